"""The live view of a run: what it has learned, whether it is healthy, and what it waits for.

Built from the new lines of metrics.jsonl and the members' last reports; it keeps no lock, writes
nothing, and a missing file or a lost server is shown and not raised.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.audit import run_settings
from common.diagnosis import diagnose, figures_of
from common.display import show, span
from common.errors import ConfigError
from common.history import History, Row, column, number, usable
from common.ledger import FATES

RECENT = 20
"""Batches whose mean time gives the time that is left."""
MEMBERS_SHOWN = 4
SILENT_S = 10.0
"""Age of a report from which a member is shown as silent."""
BLOCKS = "▁▂▃▄▅▆▇█"

Status = dict[str, Any]


class Tail:
    """The new complete lines of a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """Lines since the last call; one that is not finished yet is left for the next."""
        try:
            size = self.path.stat().st_size
            if size == self._offset:
                return
            with self.path.open("rb") as file:
                file.seek(self._offset if size > self._offset else 0)
                data = file.read()
                end = data.rfind(b"\n") + 1
                self._offset = file.tell() - len(data) + end
        except OSError:
            return
        yield from data[:end].splitlines()


class LiveView:
    """Figures of a run as they come; `read_status` gives what `common.status` reads, if anything.

    Rows that are there already are taken in at once: `plain_lines` tells only what comes after.
    """

    def __init__(self, run_dir: Path, read_status: Callable[[], Status] | None) -> None:
        self.run_dir, self.read_status = run_dir, read_status
        self.history = History()
        self._tail = Tail(run_dir / "metrics.jsonl")
        self._settings: dict[str, dict[str, Any]] = {}
        self._take()

    def render(self) -> RenderableType:
        """The whole view, for a terminal of 100 columns and 30 rows or more."""
        self._take()
        status = self.read_status() if self.read_status else {}
        columns = Table.grid(expand=True, padding=(0, 2))
        columns.add_column(ratio=6)
        columns.add_column(ratio=7)
        columns.add_row(self._learning(), self._health(status))
        body = [self._progress(status), Text(), columns, Text(), self._fates(status)]
        if self.read_status:
            body += [_members(status), Text(), self._waiting(status)]
        name = self._setting("run", "name") or self.run_dir.name
        return Panel(Group(*body), title=f"[bold]{name}[/bold]", title_align="left")

    def plain_lines(self) -> Iterator[str]:
        """One line for each batch, evaluation and lost member since the last call."""
        yield from self._take()

    # --- reading ----------------------------------------------------------------------------------

    def _take(self) -> list[str]:
        """Read the new rows; returns them as lines, those that are worth one."""
        lines = []
        for line in self._tail.lines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if usable(row):
                members = self._members_of_last_round()
                self.history.add(row)
                lines.append(self._line(row, members))
        return [line for line in lines if line]

    def _line(self, row: Row, members: int) -> str:
        """A row in words, after it was taken in; `members` came through the round before it."""
        if row["kind"] == "batch":
            return self._batch_line(row)
        if row["kind"] == "eval":
            accuracy, error = _of(row, "accuracy"), _of(row, "standard_error")
            files: dict[str, Row] = row.get("files") or {}
            each = ", ".join(f"{name} {_of(found, 'accuracy')}" for name, found in files.items())
            named = f" ({each})" if len(files) > 1 else ""
            return f"evaluation {row['label']}: accuracy {accuracy} ± {error}{named}"
        if row.get("failed"):
            return f"weight round {row.get('round')} failed: {row['failed']}"
        now = int(number(row, "members") or 0)
        if row["kind"] == "round" and now < members:
            return (
                f"weight round {row.get('round')} reached {now} of {members} generators; "
                f"see {self.run_dir / 'logs'}"
            )
        return ""

    def _setting(self, section: str, key: str) -> Any:
        """A value of the run's config.toml, None as long as it is not written."""
        if not self._settings:
            try:
                self._settings = run_settings(self.run_dir)
            except ConfigError:
                return None
        return self._settings.get(section, {}).get(key)

    def _members_of_last_round(self) -> int:
        rounds = [row for row in self.history.rounds[-8:] if not row.get("failed")]
        return int(number(rounds[-1], "members") or 0) if rounds else 0

    @property
    def _last(self) -> Row | None:
        return self.history.batches[-1] if self.history.batches else None

    def _seconds_per_batch(self) -> float | None:
        """Mean over the last batches, pauses included."""
        recent = self.history.batches[-RECENT - 1 :]
        if len(recent) < 2:
            return None
        batches = recent[-1]["step"] - recent[0]["step"]
        seconds: float = (recent[-1]["time"] - recent[0]["time"]) / batches
        return seconds

    # --- parts of the view ------------------------------------------------------------------------

    def _progress(self, status: Status) -> RenderableType:
        """Batch number of the total, a bar, and the time that is left."""
        done = self._last["step"] if self._last else 0
        total = self._setting("run", "batches")
        each = self._seconds_per_batch()
        left = (total - done) * each if total and each else None
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=max(1, total or 1), completed=done)
        if done >= (total or 1):
            eta = "all batches trained"
        else:
            eta = f"{span(left)} left" if left is not None else "time left not known yet"
        if status.get("ended"):
            eta = f"ended: {status['ended']}"
        table.add_row(f"batch {done} of {total or '?'}", bar, eta)
        return table

    def _learning(self) -> Table:
        row = self._last
        table = _table("Learning")
        table.add_row("held-out", self._held_out())
        table.add_row("accuracy", _list(row, ("accuracy_raw", "all"), ("accuracy", "trained")))
        table.add_row("", Text(sparkline(column(self.history.batches, "accuracy_raw")), "cyan"))
        table.add_row("reward", _list(row, ("reward_raw", "all"), ("reward", "trained")))
        lengths = (("length_mean_raw", "all"), ("length_mean", "trained"))
        table.add_row("length", _list(row, *lengths))
        table.add_row(
            "at the cap", _list(row, ("truncated_share", "all"), ("at_cap_share", "trained"))
        )
        table.add_row("entropy", _of(row, "entropy"))
        table.add_row("clipped", _list(row, ("clip_upper", "above"), ("clip_lower", "below")))
        return table

    def _held_out(self) -> str:
        """Accuracy before training and by the newest evaluation."""
        before, evals = self.history.evaluation("before"), self.history.evals
        if not evals or evals[-1] is before:
            return f"{_of(before, 'accuracy')} before"
        now = evals[-1]
        return f"{_of(before, 'accuracy')} → {_of(now, 'accuracy')} at batch {now['step']}"

    def _health(self, status: Status) -> Table:
        row, rounds, phases = self._last, self.history.rounds, self.history.phases
        learner = status.get("reports", {}).get("learner", {})
        streams = status.get("streams") or row
        table = _table("Pipeline")
        table.add_row("staleness", self._staleness())
        table.add_row("log-prob gap", _list(row, ("gap_mean", "mean"), ("gap_max", "worst")))
        table.add_row("probe gap", _of(rounds[-1] if rounds else None, "probe_gap"))
        if phases:
            wait, train, publish = phases[-1]
            table.add_row("seconds", f"{wait:.1f} wait, {train:.1f} train, {publish:.1f} publish")
        table.add_row("tokens/s", self._rates(status))
        names = ("prompts", "rollouts", "verdicts")
        table.add_row("queues", _list(streams, *((name, name) for name in names)))
        table.add_row("open groups", f"{_of(learner, 'open')} of {_of(learner, 'capacity')}")
        if dead := status.get("streams", {}).get("dead"):
            table.add_row("dead letters", Text(f"{dead}, see the logs", "bold red"))
        return table

    def _staleness(self) -> Text:
        bound, worst = (
            self._setting("admission", "max_staleness"),
            number(self._last, "staleness_max"),
        )
        broken = worst is not None and bound is not None and worst > bound
        figures = (("staleness_mean", "mean"), ("staleness_max", "worst"))
        text = f"{_list(self._last, *figures)}, bound {show(bound)}"
        return Text(text, "bold red" if broken else "")

    def _rates(self, status: Status) -> str:
        """Tokens per second: of all generators in the last second, of the learner of late."""
        each, tokens = self._seconds_per_batch(), number(self._last, "tokens_trained")
        trained = round(tokens / each) if tokens and each else None
        if "reports" not in status:
            return f"{show(trained)} trained"
        made = sum(number(r, "tokens_per_second") or 0 for r in _living(status, "generator"))
        return f"{made:,.0f} generated, {show(trained)} trained"

    def _fates(self, status: Status) -> Text:
        """Groups by fate, from the learner's report or else from its last batch."""
        row = self._last or {}
        counts = status.get("reports", {}).get("learner", {}).get("fates") or {
            fate: row.get(f"groups_{fate}", 0) for fate in FATES
        }
        return Text("groups  ", "bold") + Text(
            ", ".join(f"{counts.get(fate, 0):,} {fate}" for fate in FATES)
        )

    def _waiting(self, status: Status) -> Text:
        """What is not there, or what nothing goes on without."""
        if "error" in status:
            return Text(status["error"], "bold red", overflow="ellipsis", no_wrap=True)
        if "learner" not in status.get("members", {}):
            return Text("no learner: it is starting, or it has ended", "yellow")
        learner = status.get("reports", {}).get("learner", {})
        now = time.time()
        silent = now - (number(learner, "time") or now)
        if silent > SILENT_S:
            return Text(f"the learner has not reported for {span(silent)}", "bold red")
        verdict = diagnose(figures_of(status, self._last))
        if verdict.knob:
            text = f"{verdict.verdict}: {verdict.figure}"
            return Text(text, "yellow", overflow="ellipsis", no_wrap=True)
        waiting = learner.get("waiting_for")
        if not waiting:
            return Text("nothing is waited for", "dim")
        since = f" (last batch {span(now - self._last['time'])} ago)" if self._last else ""
        return Text(f"waiting: {waiting}{since}", "yellow", overflow="ellipsis", no_wrap=True)

    def _batch_line(self, row: Row) -> str:
        total = self._setting("run", "batches")
        step, phases = row["step"], self.history.phases[-1]
        return (
            f"batch {step}{f'/{total}' if total else ''}: accuracy {_of(row, 'accuracy_raw')}, "
            f"trained {_of(row, 'accuracy')}, reward {_of(row, 'reward_raw')}, "
            f"length {_of(row, 'length_mean_raw')}, entropy {_of(row, 'entropy')}, "
            f"staleness {_of(row, 'staleness_max')}, gap {_of(row, 'gap_mean')}, "
            f"wait/train/publish {phases.wait:.1f}/{phases.train:.1f}/{phases.publish:.1f} s"
        )


def sparkline(values: list[float], width: int = 24) -> str:
    """The last values as blocks between the least and the largest; NaN is a gap."""
    if len(values) > width:  # means of equal parts, so that the whole run is seen
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        parts = [values[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        values = [sum(part) / len(part) for part in parts]
    known = [value for value in values if value == value]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((v - low) * scale)] if v == v else " " for v in values)


def _members(status: Status) -> Table:
    """Who is alive: generators one by one, verifiers together."""
    table = Table.grid(padding=(0, 3))
    living = [name for name, info in _roles(status) if info.get("role") == "generator"]
    verifiers = sum(info.get("role") == "verifier" for _, info in _roles(status))
    table.add_row(Text(f"alive   {len(living)} × generator, {verifiers} × verifier", "bold"))
    reports = status.get("reports", {})
    for name in living[:MEMBERS_SHOWN]:
        report = reports.get(name, {})
        version = report.get("version") or "no weights yet"
        rate = f"{_of(report, 'tokens_per_second')} tokens/s"
        table.add_row(
            f"        {name}", f"version {version}", f"{_of(report, 'running')} samples", rate
        )
    if len(living) > MEMBERS_SHOWN:
        table.add_row(f"        and {len(living) - MEMBERS_SHOWN} more")
    return table


def _roles(status: Status) -> list[tuple[str, Row]]:
    return sorted(status.get("members", {}).items())


def _living(status: Status, role: str) -> list[Row]:
    """Reports of the members of a role that hold a lease."""
    reports = status.get("reports", {})
    names = [name for name, info in _roles(status) if info.get("role") == role]
    return [reports[name] for name in names if name in reports]


def _table(title: str) -> Table:
    table = Table(box=None, show_header=False, title=title, title_justify="left", padding=(0, 1))
    table.add_column(style="dim", no_wrap=True, min_width=12)
    table.add_column(no_wrap=True)
    return table


def _of(row: Row | None, key: str) -> str:
    return show(number(row, key))


def _list(row: Row | None, *figures: tuple[str, str]) -> str:
    """`0.4 all, 0.5 trained` of (key, name)."""
    return ", ".join(f"{_of(row, key)} {name}" for key, name in figures)
