"""The plots of a report, drawn from the figures of a run without pyplot's global state."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from common.history import History, column
from common.panels import (
    BLUE,
    DARK,
    FAINT,
    GREEN,
    GRID,
    ORANGE,
    PAPER,
    draw,
    evaluations,
    legend,
    panels,
    percent,
    style,
)

DPI = 100
THEME = {
    BLUE: "var(--blue)", ORANGE: "var(--orange)", GREEN: "var(--green)", DARK: "var(--ink)",
    FAINT: "var(--faint)", GRID: "var(--grid)", PAPER: "var(--card)",
    "#000000": "var(--ink)",
}  # fmt: skip
"""Colours of a plot that a page gives, dark or light."""
_NAMES = re.compile(r'(\bid="|\bhref="#|url\(#)')

Reals = npt.NDArray[np.float64]


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    FigureCanvasAgg(figure).print_png(path)


def accuracy_figure(history: History, run: str) -> Figure:
    """The curve for a README: accuracy before the filter per batch, and held-out evaluations."""
    figure = Figure(figsize=(9, 5), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    batches = history.batches
    if batches:
        steps, raw = column(batches, "step"), np.asarray(column(batches, "accuracy_raw"))
        width = _width(len(batches))
        axes.plot(
            steps, raw, ".", color=BLUE, alpha=0.3, markersize=5,
            label="training batch, before filter",
        )  # fmt: skip
        label = f"mean over {width} batches"
        axes.plot(steps, smooth(raw, width), color=BLUE, linewidth=2, label=label)
    evaluations(axes, history, size=7)
    style(axes, f"Accuracy during training: {run}", "accuracy", size=11)
    percent(axes)
    legend(axes, 10)
    return figure


def smooth(values: Sequence[float] | Reals, width: int) -> Reals:
    """Centred moving mean over `width` values that leaves out NaN; shorter at the ends."""
    array, half = np.asarray(values, dtype=np.float64), width // 2
    known = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(array))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(array))
    total = counts[high] - counts[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(total > 0, (sums[high] - sums[low]) / total, math.nan)


def _width(batches: int) -> int:
    """An odd width that leaves about a dozen independent values."""
    return max(1, min(25, batches // 12)) | 1


def curves_figure(history: History, run: str, bound: int | None) -> Figure:
    """All panels on one sheet; `bound` is the staleness allowed."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(12, 13), dpi=DPI, layout=layout)
    count = len(history.batches)
    figure.suptitle(f"{run}: {count} batches" if count else f"{run}: no batch trained yet")
    grid = figure.subplots(4, 3)
    for axes, panel in zip(grid.flat, panels(bound), strict=True):
        draw(panel, axes, history)
    for axes in grid[:3].flat:
        axes.set_xlabel("")
    return figure


def panel_svgs(history: History, bound: int | None) -> Iterator[tuple[str, str]]:
    """Title and SVG element of each panel, for a page that defines the colours of `THEME`.

    Text stays text, in the page's font; names inside are distinct over all panels.
    """
    for index, panel in enumerate(panels(bound)):
        figure = Figure(figsize=(4.6, 2.9), dpi=72, facecolor="none")
        figure.subplots_adjust(left=0.16, right=0.98, bottom=0.17, top=0.97)
        axes = figure.add_subplot(facecolor="none")
        draw(panel, axes, history)
        title = axes.get_title(loc="left")
        axes.set_title("", loc="left")  # the page's own heading
        yield title, _svg(figure, f"p{index}-")


def _svg(figure: Figure, prefix: str) -> str:
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = _NAMES.sub(rf"\g<1>{prefix}", text[text.index("<svg") :])
    for color, variable in THEME.items():
        text = text.replace(color, variable)
    return text
