"""Numbers and times for people, in few characters."""

from __future__ import annotations

DASH = "–"


def show(value: float | None) -> str:
    """A number in few characters."""
    if value is None:
        return DASH
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.0f}"


def span(seconds: float) -> str:
    """A time, in the unit that fits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
