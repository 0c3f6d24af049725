"""An evaluation: what is sent, when it is done, and what is kept of every problem."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.data import Row
from common.errors import ConfigError, DataError
from common.messages import Judged, Verdict, Version
from common.results import Answer, ProblemResult
from learner.evaluation import Evaluation
from learner.heldout import file_names, load_heldout
from tests.conftest import MakeConfig
from tests.unit.records import a_judgement
from tests.unit.test_data import Letters, write


def rows(count: int) -> list[Row]:
    return [
        Row(str(n), np.arange(1, 3, dtype=np.int32), str(n), "math", True) for n in range(count)
    ]


def evaluation_of(count: int, label: str = "5") -> Evaluation:
    return Evaluation(label, {"h": rows(count)})


def verdict(index: int, *outcomes: str, fate: str = "accepted", reason: str = "") -> Verdict:
    judged = [a_judgement(outcome, 10, Version(1, 2)) for outcome in outcomes]
    return Verdict(f"e-{index}", -1 - index, 0, True, fate, reason, judged, "v")  # type: ignore[arg-type]


def answering(outcome: str, answer: str, extracted: str = "x") -> Judged:
    return replace(a_judgement(outcome), answer=answer, extracted=extracted)


def test_problems_are_sent_once_in_order_as_there_is_room() -> None:
    evaluation = evaluation_of(5)
    sent = [evaluation.next(room) for room in (2, 0, -3, 2, 9, 9)]
    assert sent == [[0, 1], [], [], [2, 3], [4], []]


def test_groups_are_named_by_label_and_problem() -> None:
    assert evaluation_of(2, "before").group(1) == "ebefore-1"


def test_it_is_done_when_every_problem_has_a_verdict_however_often_it_comes() -> None:
    evaluation = evaluation_of(2)
    evaluation.add(0, verdict(0, "correct"))
    evaluation.add(0, verdict(0, "correct"))
    assert not evaluation.done
    evaluation.add(1, verdict(1, "wrong"))
    assert evaluation.done


def test_problems_of_before_an_interruption_are_not_sent_again() -> None:
    first = Evaluation("5", {"a": rows(2), "b": rows(2)})
    first.add(1, verdict(1, "correct"))
    first.add(2, verdict(2, "wrong"))
    second = Evaluation("5", {"a": rows(2), "b": rows(2)})
    second.restore(first.ordered())
    assert second.next(9) == [0, 3]
    second.add(0, verdict(0, "wrong"))
    second.add(3, verdict(3, "wrong"))
    assert second.done
    assert [(r.file, r.row, r.correct) for r in second.ordered()] == [
        ("a", 1, 0),
        ("a", 2, 1),
        ("b", 1, 0),
        ("b", 2, 0),
    ]


def test_each_file_has_figures_of_its_own_beside_those_of_all() -> None:
    evaluation = Evaluation("after", {"easy": rows(1), "hard": rows(2)})
    evaluation.add(0, verdict(0, "correct", "correct"))
    evaluation.add(1, verdict(1, "wrong", "correct"))
    evaluation.add(2, verdict(2, "wrong", "wrong"))
    result = evaluation.result()
    assert (result["label"], result["problems"], result["accuracy"]) == ("after", 3, 0.5)
    assert list(result["files"]) == ["easy", "hard"]
    assert [result["files"][name]["accuracy"] for name in ("easy", "hard")] == [1.0, 0.25]
    assert [result["files"][name]["problems"] for name in ("easy", "hard")] == [1, 2]


def test_what_is_kept_of_a_problem_is_every_sample_in_counts() -> None:
    kept: list[ProblemResult] = []
    evaluation = Evaluation("5", {"h": rows(1)}, kept.append)
    judged = [
        replace(a_judgement("correct", 7, Version(1, 2)), answer="0", newest=Version(1, 3)),
        replace(a_judgement("wrong", 30), answer="5", truncated=True),
        replace(a_judgement("wrong", 9), answer="5"),
        a_judgement("no_answer", 2),
        a_judgement("error", 4),
    ]
    evaluation.add(0, replace(verdict(0), samples=judged))
    assert kept == [
        ProblemResult(
            "h", 1, "0", "0", samples=5, correct=1, no_answer=1, errors=1, truncated=1,
            answers=[Answer("5", 2, False), Answer("0", 1, True)], lengths=[7, 30, 9, 2, 4],
            versions=["1.0", "1.2", "1.3"],
        )
    ]  # fmt: skip
    assert evaluation.ordered() == kept


def test_equal_answers_in_other_words_vote_together_and_old_records_by_their_text() -> None:
    evaluation = evaluation_of(1)
    judged = [
        answering("wrong", "1/2", "0.5"),
        answering("wrong", "1/2", "\\frac12"),
        answering("wrong", "", "a half"),
    ]
    evaluation.add(0, replace(verdict(0), samples=judged))
    assert evaluation.results[0].answers == [Answer("1/2", 2, False), Answer("a half", 1, False)]


def test_a_problem_that_failed_is_kept_with_the_reason() -> None:
    evaluation = evaluation_of(1)
    evaluation.add(0, verdict(0, fate="failed", reason="generation: no memory"))
    assert evaluation.done
    [result] = evaluation.ordered()
    assert (result.samples, result.failure) == (0, "generation: no memory")
    assert evaluation.result()["failed"] == 1


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["data/aime24.jsonl"], ["aime24"]),
        (["a/aime24.jsonl", "b/amc23.parquet"], ["aime24", "amc23"]),
        (["a/test.jsonl", "b/test.jsonl"], ["a/test.jsonl", "b/test.jsonl"]),
    ],
)
def test_files_go_by_their_stems_where_these_differ(paths: list[str], names: list[str]) -> None:
    assert file_names(paths) == names


# --- held-out files -----------------------------------------------------------------------------


def sums(count: int) -> list[dict[str, object]]:
    return [{"prompt": f"{n}+{n}=", "answer": 2 * n} for n in range(count)]


def test_the_first_problems_of_each_file_are_used(make_config: MakeConfig, tmp_path: Path) -> None:
    for name, count in (("a", 5), ("b", 2)):
        write(tmp_path / f"{name}.jsonl", *sums(count))
    paths = [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    for problems, counts in ((3, [3, 2]), (None, [5, 2])):
        config = make_config(
            data={"heldout": paths}, eval={"problems": "none" if problems is None else problems}
        )
        found = load_heldout(config, Letters())
        assert list(found) == ["a", "b"]
        assert [len(rows) for rows in found.values()] == counts


def test_one_file_may_be_written_without_brackets_and_none_is_no_evaluation(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    write(tmp_path / "a.jsonl", *sums(1))
    config = make_config(data={"heldout": f"{tmp_path}/a.jsonl"})
    assert config.data.heldout == [f"{tmp_path}/a.jsonl"]
    assert list(load_heldout(config, Letters())) == ["a"]
    assert load_heldout(make_config(), Letters()) == {}
    with pytest.raises(ConfigError, match=r"data\.heldout"):
        make_config(data={"heldout": []})


def test_a_file_that_repeats_its_problems_is_refused_whatever_part_of_it_is_used(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    write(tmp_path / "aime.jsonl", *sums(3), *sums(3))
    config = make_config(data={"heldout": f"{tmp_path}/aime.jsonl"}, eval={"problems": 2})
    with pytest.raises(DataError, match=r"aime\.jsonl repeats its problems: 6 rows, 3 distinct"):
        load_heldout(config, Letters())
