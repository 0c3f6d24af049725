"""The page of a report: what it says, and that nothing written by others becomes part of it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from common.history import read_history
from common.report import summary
from common.report_page import LONGEST, card, page
from common.rollout_log import RolloutLog
from common.rollout_view import Wanted, select
from tests.unit.synthetic_run import a_group, write_config, write_run

ATTACK = '<script>alert(1)</script><b onclick="x">\'&amp;'


class Document(HTMLParser):
    """Tags with their attributes, text in `pre`, and names, of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.open: list[str] = []
        self.pre: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "pre":
            self.pre.append("")
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href"):
                self.addresses.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "pre":
            self.pre[-1] += data
        elif "style" not in self.open:
            self.words.append(data)


def page_of(run_dir: Path, *groups: dict[str, Any]) -> str:
    log = RolloutLog(run_dir, 2**30)
    for group in groups:
        log.write(group)
    return page(run_dir, read_history(run_dir), summary(run_dir))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with samples of every kind, some of them hostile."""
    run_dir = tmp_path_factory.mktemp("reported")
    write_run(run_dir, batches=30)
    with (run_dir / "config.toml").open("a") as file:
        file.write(f"# {ATTACK}\n")
    hostile = a_group(30, group="8", texts=[ATTACK] * 3, prompt=ATTACK, gold=ATTACK, reason=ATTACK)
    for sample in hostile["samples"]:
        sample |= {"answer": ATTACK, "why": ATTACK, "generator": ATTACK, "versions": [ATTACK]}
    return page_of(
        run_dir,
        a_group(30, rewards=[1.0, -1.0], texts=["a fine answer", "a poor answer"]),
        hostile,
        a_group(29, rewards=[-1.5], texts=["and on and on"]),
        a_group(28, rewards=[-1.0], texts=["all wrong"], fate="filtered", reason="all_wrong"),
        a_group(27, rewards=[-1.0], texts=["half a group"], fate="failed", reason="no checker"),
    )


def test_the_page_has_tiles_curves_tables_samples_and_the_configuration(text: str) -> None:
    document = Document(text)
    words = " ".join(" ".join(document.words).split())
    for part in (
        "34.0% → 81.0%", "30 of 30 batches", "of 30 planned", "balanced", "81.0% ± 2.0%",
        "first and last tenth", "filtered (all_wrong)", "failed (no checker)", "Best reward",
        "Worst reward", "Cut off at the length cap", "Of groups that were filtered",
    ):  # fmt: skip
        assert part in words, part
    assert document.tags.count("svg") == 12
    for sample in ("a fine answer", "a poor answer", "and on and on", "all wrong", "half a group"):
        assert any(sample in pre for pre in document.pre), sample
    assert "max_staleness = 2" in document.pre[-1]


def test_what_others_wrote_is_shown_and_never_markup(text: str) -> None:
    document = Document(text)
    assert "script" not in document.tags and document.handlers == []
    assert "<b onclick" not in text
    assert document.pre.count(f"\n{ATTACK}") >= 3  # as it was written
    assert ATTACK in document.pre[-1]


def test_the_page_needs_nothing_from_elsewhere(text: str) -> None:
    document = Document(text)
    beside = {"curves.png", "accuracy.png", "summary.json", "report.txt"}
    for address in document.addresses:
        assert address.startswith("#") or address in beside, address
    assert not {"script", "link", "iframe", "img", "object"} & set(document.tags)
    assert "default-src 'none'" in text and "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_names_inside_the_plots_do_not_clash_and_references_lead_somewhere(text: str) -> None:
    document = Document(text)
    assert len(document.ids) == len(set(document.ids))
    used = re.findall(r"url\(#([^)]+)\)", text)
    used += [address[1:] for address in document.addresses if address.startswith("#")]
    assert set(used) <= set(document.ids)


def test_plots_have_the_colours_of_the_page_alone(text: str) -> None:
    """So that they can be read in the dark."""
    plots = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--ink)" in plots and "var(--blue)" in plots
    assert re.findall(r"(?:stroke|fill): ?#\w+", plots) == []


def test_a_run_without_batches_or_rollouts_has_a_page(tmp_path: Path) -> None:
    write_config(tmp_path, batches=5)
    document = Document(page_of(tmp_path))
    words = " ".join(document.words)
    assert "No rollouts are kept yet" in words and "nothing measured yet" in words
    assert "Evaluations" not in words


def test_a_very_long_response_is_cut_and_says_so() -> None:
    (whole,) = select([a_group(1, rewards=[1.0], texts=["y" * LONGEST])], Wanted())
    (longer,) = select([a_group(1, rewards=[1.0], texts=["y" * (LONGEST + 5)])], Wanted())
    assert card(whole).response == "y" * LONGEST
    assert card(longer).response.startswith("y" * LONGEST + "\n… 5 characters more")
