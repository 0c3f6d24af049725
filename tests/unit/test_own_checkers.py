"""Checkers in a file that the recipe names: how they are found, refused, and run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import dump_toml, load_config, parse_config
from common.data import load_rows
from common.errors import ConfigError, DataError
from common.own_checks import require_own_checkers
from common.prepare import Options, prepare
from common.sections import VerifierSection
from common.startup import resolve
from verifier import registry
from verifier.own_checkers import CheckerFault, load
from verifier.pool import CheckerPool
from verifier.registry import UnknownChecker
from verifier.verify_file import verify_file

FILE = """
from dataclasses import dataclass
from verifier.outcome import Verdict

@dataclass
class Word:
    text: "str"

def length(response, gold, **options):
    if not response:
        return Verdict("no_answer", reason="empty")
    return len(Word(response).text) == int(gold)

def lacks_options(response, gold): return True
def needs_more(response, gold, language, **options): return True
number = 3
"""


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    yield
    registry.install({})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(FILE)
    return path


async def test_a_checker_in_a_file_judges_with_all_four_outcomes(file: Path) -> None:
    registry.install({"length": f"{file}:length"})
    async with CheckerPool(1, deadline_s=5.0, warm=()) as pool:
        outcomes = [
            (await pool.check("length", response, gold, {"boxed": True})).label
            for response, gold in (("abc", "3"), ("abcd", "3"), ("", "3"), ("abc", "three"))
        ]
    *judged, failed = outcomes
    assert judged == ["correct", "wrong", "no_answer"]
    assert failed.startswith("error: ValueError: invalid literal")


@pytest.mark.parametrize("made", ["Verdict('right')", "Verdict('correct', extracted=3)"])
def test_a_verdict_of_another_form_is_an_error(file: Path, made: str) -> None:
    file.write_text(f"{FILE}\ndef other(response, gold, **options): return {made}\n")
    registry.install({"other": f"{file}:other"})
    verdict = registry.run("other", "abc", "3", {})
    assert verdict.outcome == "error"
    assert "an outcome is one of correct, wrong, no_answer, error, and the rest is text" in (
        verdict.reason
    )


@pytest.mark.parametrize("made", ["None", "'correct'", "{'score': 1}", "float('nan')"])
def test_what_is_neither_a_truth_nor_a_number_nor_a_verdict_is_an_error_that_says_so(
    file: Path, made: str
) -> None:
    file.write_text(f"{FILE}\ndef other(response, gold, **options): return {made}\n")
    registry.install({"other": f"{file}:other"})
    verdict = registry.run("other", "abc", "3", {})
    assert verdict.outcome == "error"
    assert "return True, False, a number, or a verifier.outcome.Verdict" in verdict.reason


def test_a_start_tries_each_checker_on_an_empty_response_to_its_first_row(
    file: Path, tmp_path: Path
) -> None:
    file.write_text(FILE + "\ndef forgets(response, gold, **options): response == gold\n")
    rows = tmp_path / "rows.jsonl"
    settings = VerifierSection(
        checkers={"length": f"{file}:length", "forgets": f"{file}:forgets"}, checker="length"
    )
    rows.write_text(json.dumps({"prompt": "p", "answer": "3"}) + "\n")
    require_own_checkers(settings, [str(rows), str(tmp_path / "not there yet.jsonl")])
    rows.write_text(json.dumps({"prompt": "p", "answer": "3", "checker": "forgets"}) + "\n")
    with pytest.raises(ConfigError, match=r"checkers.forgets.*row 1, gold '3': .*returned None"):
        require_own_checkers(settings, [str(rows)])


def test_a_default_checker_that_nothing_provides_is_named_by_its_key() -> None:
    with pytest.raises(ConfigError, match="verifier.checker = 'honset': no checker is named"):
        require_own_checkers(VerifierSection(checker="honset"))


def test_its_code_is_not_run_in_the_process_that_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('loaded')")
    registry.install({"mine": f"{tmp_path}/own.py:check"})
    assert registry.get("mine").pooled


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("own.py", "write it as FILE.py:FUNCTION"),
        ("absent.py:check", "there is no file .*absent.py; paths are relative"),
        ("own.py:absent", "own.py has no function absent; define it"),
        ("own.py:number", "own.py has no function number"),
        ("own.py:lacks_options", "unexpected keyword.*def lacks_options.response, gold, ..options"),
        ("own.py:needs_more", "missing.*'language'.*write it as def needs_more"),
        ("broken.py:check", "broken.py fails when it is loaded: NameError: .*line 2"),
    ],
)
def test_what_is_no_checker_is_refused_with_its_file_and_the_remedy(
    file: Path, place: str, why: str
) -> None:
    (file.parent / "broken.py").write_text("\nabsent()\n")
    with pytest.raises(CheckerFault, match=f"(?s){why}"):
        load(str(file.parent / place))


def test_a_start_names_every_checker_that_cannot_be_loaded_even_one_that_hangs(file: Path) -> None:
    (file.parent / "ends.py").write_text("import os\nos._exit(3)\n")
    (file.parent / "hangs.py").write_text("while True: pass\n")
    places = ("own.py:length", "own.py:absent", "ends.py:check", "hangs.py:check")
    names = ("sound", "absent", "ends", "hangs")
    section = {
        "checkers": {
            name: f"{file.parent}/{place}" for name, place in zip(names, places, strict=True)
        },
        "slow_deadline_s": 2.0,
    }
    with pytest.raises(ConfigError) as caught:
        require_own_checkers(VerifierSection.model_validate(section))
    absent, ends, hangs = str(caught.value).split("; verifier.checkers.")
    assert absent.startswith(f"verifier.checkers.absent = '{file}:absent': {file} has no function")
    assert "ends its process" in ends and "verifier.slow_memory_mib = 2048" in ends
    assert "not loaded within verifier.slow_deadline_s = 2; do less" in hangs


@pytest.mark.parametrize(
    ("checkers", "why"),
    [
        ({"length": "own.py"}, "length = 'own.py' is no place; write FILE.py:FUNCTION"),
        ({"length": "own:check"}, "is no place"),
        ({"a:b": "own.py:check"}, "'a:b' is no name; write letters"),
    ],
)
def test_the_recipe_key_names_what_cannot_be_a_checker(checkers: dict[str, str], why: str) -> None:
    tree = {"model": {"path": "m"}, "data": {"train": ["t"]}, "verifier": {"checkers": checkers}}
    with pytest.raises(ConfigError, match=f"(?s)verifier.checkers.*{why}"):
        parse_config(tree, "recipe")


@pytest.mark.parametrize("name", ["math", "math_verify", "reasoning_gym"])
def test_a_name_that_is_there_already_is_refused(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"verifier.checkers.{name}.*choose another name"):
        registry.install({name: f"{file}:length"})


def test_a_data_row_names_a_checker_of_the_recipe_and_never_a_file(file: Path) -> None:
    data = file.parent / "train.jsonl"
    registry.install({"length": f"{file}:length"})
    data.write_text('{"prompt": "p", "answer": 3, "checker": "length"}\n')
    assert load_rows([str(data)], Characters(), "raw", 9, "math", True)[0].checker == "length"
    data.write_text(f'{{"prompt": "p", "answer": 3, "checker": "{file}:length"}}\n')
    with pytest.raises(DataError, match="row 1: no checker is named.*verifier.checkers gives"):
        load_rows([str(data)], Characters(), "raw", 9, "math", True)


class Characters:
    """A tokenizer of characters."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]


def test_the_configuration_that_a_run_keeps_finds_the_file_from_anywhere(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = file.parent / "recipe.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[data]\ntrain = ["t"]\n'
        '[verifier]\nchecker = "length"\ncheckers = { length = "own.py:length" }\n'
    )
    monkeypatch.chdir(file.parent)
    kept = file.parent / "config.toml"
    kept.write_text(dump_toml(resolve(load_config(recipe))))
    monkeypatch.chdir("/")
    again = resolve(load_config(kept))
    assert again.verifier.checkers == {"length": f"{file}:length"}
    assert again.verifier.checker == "length"


def test_a_labelled_file_is_compared_with_the_function_of_a_file(file: Path) -> None:
    rows = file.parent / "rows.jsonl"
    rows.write_text(
        '{"response": "abc", "gold": 3, "expected": "correct"}\n'
        '{"response": "", "gold": 3, "expected": "no_answer"}\n'
        '{"response": "ab", "gold": 3, "correct": true}\n'
    )
    report = verify_file(rows, f"{file}:length")
    assert (report.n, report.agree, report.false_negative, report.no_answer) == (3, 2, 1, 1)
    with pytest.raises(ConfigError, match="own.py:absent: .* has no function absent"):
        verify_file(rows, f"{file}:absent")
    with pytest.raises(UnknownChecker, match="no checker is named 'length'"):
        verify_file(rows, "length")


def test_a_fault_is_the_outcome_error_where_a_file_goes_in_mid_run(file: Path) -> None:
    registry.install({"length": f"{file}:length"})
    file.unlink()
    assert registry.run("length", "abc", "3", {}).label.startswith("error: CheckerFault: there is")


def test_preparing_data_tries_the_golds_and_writes_no_file_into_the_rows(file: Path) -> None:
    rows, out = file.parent / "rows.jsonl", file.parent / "out.jsonl"
    rows.write_text('{"prompt": "a", "answer": 3}\n{"prompt": "b", "answer": "three"}\n')
    report = prepare([rows], out, Options(checker=f"{file}:length"), lambda what, count: None)
    assert [found.where for found in report.unreadable] == [f"{rows}, row 2"]
    assert json.loads(out.read_text()) == {"prompt": "a", "answer": "3", "source": "rows"}
