"""The plots of a report, drawn from the figures of a run without pyplot's global state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator, PercentFormatter

from common.history import History, Row, column, number

DPI = 100
BEFORE, AFTER, THIRD, DARK, FAINT = "#2f6db3", "#e07b39", "#4c9f70", "#222222", "#9a9a9a"
"""Colours that stay apart in grey and for colour-blind readers."""

Reals = npt.NDArray[np.float64]


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    FigureCanvasAgg(figure).print_png(path)


# --- the curve for a README ---------------------------------------------------------------------


def accuracy_figure(history: History, run: str) -> Figure:
    """One curve: accuracy before the filter per batch, and the held-out evaluations."""
    figure = Figure(figsize=(9, 5), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    batches = history.batches
    if batches:
        steps, raw = _steps(batches), np.asarray(column(batches, "accuracy_raw"))
        width = _width(len(batches))
        axes.plot(
            steps,
            raw,
            ".",
            color=BEFORE,
            alpha=0.3,
            markersize=5,
            label="training batch, before filter",
        )
        label = f"mean over {width} batches"
        axes.plot(steps, smooth(raw, width), color=BEFORE, linewidth=2, label=label)
    _evaluations(axes, history, size=7)
    _style(axes, f"Accuracy during training: {run}", "accuracy", size=11)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes, 10)
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


# --- small multiples ----------------------------------------------------------------------------


def curves_figure(history: History, run: str, bound: int | None) -> Figure:
    """Nine panels over batches; `bound` is the staleness allowed."""
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(12, 10), dpi=DPI, layout=layout)
    count = len(history.batches)
    figure.suptitle(f"{run}: {count} batches" if count else f"{run}: no batch trained yet")
    panels: list[Callable[[Axes, History], None]] = [
        _accuracy,
        _reward,
        _length,
        _cap,
        _entropy,
        _clip,
        lambda axes, history: _staleness(axes, history, bound),
        _gap,
        _seconds,
    ]
    grid = figure.subplots(3, 3)
    for axes, panel in zip(grid.flat, panels, strict=True):
        axes.set_prop_cycle(cycler(color=[BEFORE, AFTER, THIRD], linewidth=[1.3] * 3))
        panel(axes, history)
        _legend(axes, 8)
    for axes in grid[:2].flat:
        axes.set_xlabel("")
    return figure


def _accuracy(axes: Axes, history: History) -> None:
    _lines(axes, history, ("accuracy_raw", "before filter"), ("accuracy", "after filter"))
    _evaluations(axes, history, size=4)
    _style(axes, "Accuracy", "share correct")


def _reward(axes: Axes, history: History) -> None:
    _lines(axes, history, ("reward_raw", "before filter"), ("reward", "after filter"))
    _style(axes, "Shaped reward", "mean reward", from_zero=False)


def _length(axes: Axes, history: History) -> None:
    _lines(axes, history, ("length_mean_raw", "generated"), ("length_mean", "trained"))
    _style(axes, "Response length", "mean tokens")


def _cap(axes: Axes, history: History) -> None:
    _lines(axes, history, ("truncated_share", "generated"), ("at_cap_share", "trained"))
    _style(axes, "Responses at the length cap", "share")


def _entropy(axes: Axes, history: History) -> None:
    _lines(axes, history, ("entropy", ""))
    _style(axes, "Entropy of the policy", "nats per token")


def _clip(axes: Axes, history: History) -> None:
    _lines(axes, history, ("clip_upper", "upper"), ("clip_lower", "lower"))
    _style(axes, "Clipped tokens", "share")


def _staleness(axes: Axes, history: History, bound: int | None) -> None:
    if history.batches:
        _lines(axes, history, ("staleness_mean", "mean"))
        worst = column(history.batches, "staleness_max")
        axes.plot(
            _steps(history.batches), worst, ".", color=AFTER, markersize=4, clip_on=False,
            label="worst",
        )  # fmt: skip
        if bound is not None:
            axes.axhline(bound, color=DARK, linestyle="--", linewidth=1, label=f"bound {bound}")
    _style(axes, "Staleness at the start of a batch", "policy versions")


def _gap(axes: Axes, history: History) -> None:
    """Between engine and learner, on a log scale: what is exactly 0 is left out."""
    measured = [row for row in history.batches if number(row, "gap_tokens") != 0]
    probed = [row for row in history.rounds if row.get("members")]
    drawn = False
    for rows, key, label, style in (
        (measured, "gap_mean", "batch mean", "-"),
        (measured, "gap_max", "worst token", "-"),
        (probed, "probe_gap", "probe", "."),
    ):
        values = np.asarray(column(rows, key), dtype=np.float64)
        values[~(values > 0)] = math.nan
        if np.isfinite(values).any():
            axes.plot(_steps(rows), values, style, label=label, markersize=3)
            drawn = True
    if drawn:
        axes.set_yscale("log")
    _style(axes, "Log-prob gap, tokens of this version", "|Δ log p|", from_zero=False)


def _seconds(axes: Axes, history: History) -> None:
    if history.phases:
        tops = np.cumsum(np.asarray(history.phases, dtype=np.float64), axis=1)
        steps = _steps(history.batches)
        edges = np.asarray([*steps, steps[-1] + 1]) - 0.5
        colors, base = (FAINT, BEFORE, AFTER), np.zeros(len(steps))
        for name, color, top in zip(("wait", "train", "publish"), colors, tops.T, strict=True):
            axes.stairs(top, edges, baseline=base, fill=True, color=color, label=name)
            base = top
    _style(axes, "Time per batch", "seconds")
    if history.phases:
        # the pause of a restart would flatten all the others
        axes.set_ylim(top=1.4 * float(np.percentile(base, 98)) or 1.0)


# --- parts --------------------------------------------------------------------------------------


def _lines(axes: Axes, history: History, *curves: tuple[str, str]) -> None:
    """One line for each (figure, label) that was measured at least once."""
    for key, label in curves:
        values = column(history.batches, key)
        if any(map(math.isfinite, values)):
            marker = "." if len(values) < 3 else ""
            axes.plot(_steps(history.batches), values, label=label or None, marker=marker)


def _evaluations(axes: Axes, history: History, size: float) -> None:
    """Held-out points with one standard error over problems to each side."""
    rows = [row for row in history.evals if number(row, "accuracy") is not None]
    if rows:
        errors = np.nan_to_num(column(rows, "standard_error"))
        steps = [int(row["label"]) if row["label"].isdigit() else row["step"] for row in rows]
        axes.errorbar(
            steps, column(rows, "accuracy"), yerr=errors, fmt="D", color=DARK, ecolor=DARK,
            markersize=size, capsize=3, elinewidth=1, zorder=5, label="held-out ± s.e.",
        )  # fmt: skip


def _steps(rows: list[Row]) -> list[float]:
    return column(rows, "step")


def _style(axes: Axes, title: str, ylabel: str, from_zero: bool = True, size: float = 9) -> None:
    """Labels, a light grid, no box, and room above the data for the legend."""
    axes.set_title(title, fontsize=size + 1, loc="left", fontweight="bold")
    axes.set_xlabel("batch (policy version)", fontsize=size)
    axes.set_ylabel(ylabel, fontsize=size)
    axes.tick_params(labelsize=size - 1)
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if axes.has_data():
        _headroom(axes, from_zero)
        return
    axes.set(xticks=[], yticks=[])
    axes.text(
        0.5, 0.5, "nothing measured yet", color=FAINT, ha="center", va="center",
        transform=axes.transAxes,
    )  # fmt: skip


def _headroom(axes: Axes, from_zero: bool) -> None:
    """Leave the upper sixth of a panel to its legend."""
    low, high = axes.get_ylim()
    if from_zero:
        high = max(axes.dataLim.y1, 0.0) or 1.0
        axes.set_ylim(0.0, 1.2 * high)
    elif axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** 0.2)
    else:
        axes.set_ylim(low, high + 0.2 * (high - low))


def _legend(axes: Axes, size: float) -> None:
    """One line at the top, where `_headroom` has made room."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        axes.legend(
            fontsize=size, frameon=False, loc="upper left", ncols=len(names), handlelength=1.2,
            columnspacing=1.2, handletextpad=0.5, borderaxespad=0.1,
        )  # fmt: skip
