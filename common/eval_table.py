"""The result of `dapo eval` for reading: a table for each data file, and the hardest problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.results import ProblemResult

Figures = dict[str, Any]
DASH = "–"
PROMPT_CHARS = 400
ANSWERS = 4


def as_text(result: Figures) -> str:
    """The tables of a `result.json`, below a line that says what was evaluated and how."""
    blocks = [_head(result)]
    for name, planned in result["planned"].items():
        found = result["files"].get(name)
        if found is None:
            blocks.append(f"{name}: none of {planned} problems was done")
        else:
            blocks.append("\n".join(_table(name, planned, found, result["k"])))
    if not result["complete"]:
        blocks.append("PARTIAL: stopped before the end; the figures are of the problems done")
    return "\n\n".join(blocks)


def _head(result: Figures) -> str:
    simulated = " SIMULATED ENGINE" if result["engine"] == "simulated" else ""
    return (
        f"{result['model']}{simulated}\n"
        f"k {result['k']}, temperature {result['temperature']:g}, top_p {result['top_p']:g}, "
        f"max_tokens {result['max_tokens']}, template {result['template']}, "
        f"{result['dtype']}, seed {result['seed']}"
    )


def _table(name: str, planned: int, found: Figures, k: int) -> Iterable[str]:
    done = found["problems"] + found["failed"]
    of = f"{done} of {planned}" if done < planned else f"{planned}"
    yield f"{name}: {of} problems × {k} samples"
    yield f"  {'':<10} {'':<16} 95 % interval"
    error = _number(found["standard_error"])
    accuracy = f"{_number(found['accuracy'])} ± {error}"
    yield f"  {f'avg@{k}':<10} {accuracy:<16} {_interval(found['accuracy_interval'])}"
    for n, value in found["pass_at"].items():
        ends = _interval(found["pass_at_intervals"][n])
        yield f"  {f'pass@{n}':<10} {_number(value):<16} {ends}"
    ends = _interval(found["majority_interval"])
    yield f"  {f'maj@{k}':<10} {_number(found['majority']):<16} {ends}"
    yield f"  truncated  {_percent(found['truncated_share'])}"
    yield f"  no answer  {_percent(found['no_answer_share'])}"
    yield f"  errors     {found['errors']} samples, {found['failed']} problems without any"
    yield f"  length     {_number(found['length_mean'], 1)} tokens"
    yield f"  speed      {_number(found['samples_per_second'], 2)} samples/s"
    yield f"  made by    policy version {', '.join(map(str, found['versions'])) or DASH}"
    if found["failed"] and found["accuracy"] is not None:
        worst = found["accuracy"] * found["problems"] / done
        yield (
            f"  problems in no figure: {found['failed']}; were they wrong, avg@{k} would be "
            f"{worst:.3f}"
        )


def hardest_as_text(problems: Iterable[ProblemResult]) -> str:
    """Problems with their golds and most frequent answers."""
    return "\n\n".join("\n".join(_problem(problem)) for problem in problems)


def _problem(problem: ProblemResult) -> Iterable[str]:
    yield (
        f"{problem.file}, row {problem.row}: {problem.correct} of {problem.checked} correct, "
        f"{sum(problem.lengths) / problem.samples:.1f} tokens"
    )
    text = problem.prompt.strip()  # of a long one the end: a template stands before the problem
    yield text if len(text) <= PROMPT_CHARS else "…" + text[1 - PROMPT_CHARS :]
    given = [
        f"{answer.text or '(unnamed)'} × {answer.votes}" for answer in problem.answers[:ANSWERS]
    ]
    if len(problem.answers) > ANSWERS:
        given.append("…")
    if problem.no_answer:
        given.append(f"no answer × {problem.no_answer}")
    yield f"gold {problem.gold}; answers: {', '.join(given)}"


def _number(value: float | None, digits: int = 3) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.1%}"


def _interval(ends: tuple[float, float] | None) -> str:
    return DASH if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"
