"""The panels of a report: one small plot each of what a run has measured, over its batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator, PercentFormatter

from common.history import History, Row, column, number

BLUE, ORANGE, GREEN, DARK, FAINT, GRID, PAPER = (
    "#2f6db3", "#e07b39", "#4c9f70", "#222222", "#9a9a9a", "#e6e6e6", "#ffffff",
)  # fmt: skip
"""Colours that stay apart in grey and for colour-blind readers."""

Panel = Callable[[Axes, History], None]


def panels(bound: int | None) -> list[Panel]:
    """Every panel, in reading order; `bound` is the staleness allowed."""
    return [
        accuracy, reward, length, cap, judged, entropy, clip, gap, partial(staleness, bound=bound),
        rates, seconds, shares,
    ]  # fmt: skip


def draw(panel: Panel, axes: Axes, history: History) -> None:
    """A panel with its legend."""
    axes.set_prop_cycle(cycler(color=[BLUE, ORANGE, GREEN], linewidth=[1.3] * 3))
    panel(axes, history)
    legend(axes, 8)


# --- what is learned ----------------------------------------------------------------------------


def accuracy(axes: Axes, history: History) -> None:
    lines(axes, history, ("accuracy_raw", "before filter"), ("accuracy", "after filter"))
    evaluations(axes, history, size=4)
    style(axes, "Accuracy", "share correct")


def reward(axes: Axes, history: History) -> None:
    lines(axes, history, ("reward_raw", "before filter"), ("reward", "after filter"))
    style(axes, "Shaped reward", "mean reward", from_zero=False)


def length(axes: Axes, history: History) -> None:
    lines(axes, history, ("length_mean_raw", "generated"), ("length_mean", "trained"))
    style(axes, "Response length", "mean tokens")


def cap(axes: Axes, history: History) -> None:
    lines(axes, history, ("truncated_share", "generated"), ("at_cap_share", "trained"))
    style(axes, "Responses at the length cap", "share")


def judged(axes: Axes, history: History) -> None:
    """What the dynamic-sampling filter makes of the groups."""
    lines(
        axes, history, ("acceptance", "accepted"), ("all_correct_share", "all right"),
        ("all_wrong_share", "all wrong"),
    )  # fmt: skip
    style(axes, "Groups judged", "share")


def entropy(axes: Axes, history: History) -> None:
    lines(axes, history, ("entropy", ""))
    style(axes, "Entropy of the policy", "nats per token")


def clip(axes: Axes, history: History) -> None:
    lines(axes, history, ("clip_upper", "upper"), ("clip_lower", "lower"))
    style(axes, "Clipped tokens", "share")


# --- versions -----------------------------------------------------------------------------------


def staleness(axes: Axes, history: History, bound: int | None) -> None:
    if history.batches:
        lines(axes, history, ("staleness_mean", "mean"))
        worst = column(history.batches, "staleness_max")
        axes.plot(
            _steps(history.batches), worst, ".", color=ORANGE, markersize=4, clip_on=False,
            label="worst",
        )  # fmt: skip
        if bound is not None:
            axes.axhline(bound, color=DARK, linestyle="--", linewidth=1, label=f"bound {bound}")
    style(axes, "Staleness at the start of a batch", "policy versions")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def gap(axes: Axes, history: History) -> None:
    """Between engine and learner, on a log scale: what is exactly 0 is left out."""
    measured = [row for row in history.batches if number(row, "gap_tokens") != 0]
    probed = [row for row in history.rounds if row.get("members")]
    drawn = False
    for rows, key, label, mark in (
        (measured, "gap_mean", "batch mean", "-"),
        (measured, "gap_max", "worst token", "-"),
        (probed, "probe_gap", "probe", "."),
    ):
        values = np.asarray(column(rows, key), dtype=np.float64)
        values[~(values > 0)] = math.nan
        if np.isfinite(values).any():
            lone = np.isfinite(values).sum() < 3
            axes.plot(_steps(rows), values, "." if lone else mark, label=label, markersize=3)
            drawn = True
    if drawn:
        axes.set_yscale("log")
    style(axes, "Log-prob gap, tokens of this version", "|Δ log p|", from_zero=False)


# --- time ---------------------------------------------------------------------------------------


def rates(axes: Axes, history: History) -> None:
    """Tokens trained and generated in a batch, by what the batch took in all."""
    if history.phases:
        spent = np.array([sum(phase) or math.nan for phase in history.phases])
        trained = np.asarray(column(history.batches, "tokens_trained"))
        groups = np.asarray(column(history.batches, "groups"))
        size = np.asarray(column(history.batches, "samples")) / groups
        made = np.asarray(column(history.batches, "length_mean_raw")) * size
        made = made * np.asarray(column(history.batches, "groups_judged"))
        for tokens, label in ((made, "generated"), (trained, "trained")):
            if np.isfinite(tokens).any():
                axes.plot(_steps(history.batches), tokens / spent, label=label)
    style(axes, "Rate", "tokens per second")


def seconds(axes: Axes, history: History) -> None:
    tops = _stack(axes, history, share=False)
    style(axes, "Time per batch", "seconds")
    if tops is not None:
        # the pause of a restart would flatten all the others
        axes.set_ylim(top=1.4 * float(np.percentile(tops, 98)) or 1.0)


def shares(axes: Axes, history: History) -> None:
    tops = _stack(axes, history, share=True)
    style(axes, "Shares of the time", "share")
    if tops is not None:
        axes.set_ylim(0.0, 1.2)


def _stack(axes: Axes, history: History, share: bool) -> np.ndarray | None:
    """The phases of each batch on top of each other; returns the upper edge."""
    if not history.phases:
        return None
    tops = np.cumsum(np.asarray(history.phases, dtype=np.float64), axis=1)
    if share:
        tops = tops / np.maximum(tops[:, -1:], 1e-9)
    steps = _steps(history.batches)
    edges = np.asarray([*steps, steps[-1] + 1]) - 0.5
    base = np.zeros(len(steps))
    for name, color, top in zip(
        ("wait", "train", "publish"), (FAINT, BLUE, ORANGE), tops.T, strict=True
    ):
        axes.stairs(top, edges, baseline=base, fill=True, color=color, label=name)
        base = top
    return base


# --- parts --------------------------------------------------------------------------------------


def lines(axes: Axes, history: History, *curves: tuple[str, str]) -> None:
    """One line for each (figure, label) that was measured at least once."""
    for key, label in curves:
        values = column(history.batches, key)
        if any(map(math.isfinite, values)):
            marker = "." if len(values) < 3 else ""
            axes.plot(_steps(history.batches), values, label=label or None, marker=marker)


def evaluations(axes: Axes, history: History, size: float) -> None:
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


def style(axes: Axes, title: str, ylabel: str, from_zero: bool = True, size: float = 9) -> None:
    """Labels, a light grid, no box, and room above the data for the legend."""
    axes.set_title(title, fontsize=size + 1, loc="left", fontweight="bold")
    axes.set_xlabel("batch (policy version)", fontsize=size)
    axes.set_ylabel(ylabel, fontsize=size)
    axes.tick_params(labelsize=size - 1)
    axes.grid(True, color=GRID, linewidth=0.7)
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


def percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


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


def legend(axes: Axes, size: float) -> None:
    """One line at the top, where `_headroom` has made room; an outlier runs off behind it."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        axes.legend(
            fontsize=size, facecolor=PAPER, edgecolor="none", framealpha=1.0, borderpad=0.2,
            loc="upper left", ncols=len(names), handlelength=1.2, columnspacing=1.2,
            handletextpad=0.5, borderaxespad=0.1,
        )  # fmt: skip
