"""Records for tests: small valid ones, and hypothesis strategies for any valid one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from common.batch_files import StoredGroup
from common.messages import Judged, Prompt, Rollout, Sample, Span, Verdict, Version, encode

FINISH = st.sampled_from(["stop", "length"])
OUTCOMES = st.sampled_from(["correct", "wrong", "no_answer", "error"])
FATES = st.sampled_from(["accepted", "filtered", "failed"])

FIRST = Version(1, 0)
words = st.text(max_size=20)
numbers = st.integers(-(2**40), 2**40)
reals = st.floats(allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
attempts = st.integers(0, 2**40)
places = st.one_of(
    st.integers(0, 2**40).map(lambda ordinal: (str(ordinal), ordinal)),
    st.builds(lambda label, index: (f"e{label}-{index}", -1 - index), words, st.integers(0, 2**40)),
)
"""Name and ordinal of a group."""
versions = st.builds(Version, st.integers(0, 99), st.integers(0, 10**6))


def int_arrays(size: int | None = None) -> st.SearchStrategy[Any]:
    most, least = (30, 0) if size is None else (size, size)
    items = st.lists(st.integers(0, 2**31 - 1), min_size=least, max_size=most)
    return items.map(lambda values: np.array(values, dtype=np.int32))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    cuts = draw(st.lists(st.integers(1, 5), max_size=4))
    ends = np.cumsum(cuts).tolist()
    spans = [Span(*draw(versions), end - size, end) for size, end in zip(cuts, ends, strict=True)]
    length = ends[-1] if ends else 0
    logprobs = draw(st.lists(st.floats(width=32), min_size=length, max_size=length))
    return Sample(
        token_ids=draw(int_arrays(length)), logprobs=np.array(logprobs, dtype=np.float32),
        spans=spans, finish_reason=draw(FINISH), text=draw(words), generator=draw(words),
        seconds=draw(reals),
    )  # fmt: skip


def placed(kind: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Records whose name, ordinal and `evaluation` fit."""

    def build(place: tuple[str, int], **values: Any) -> Any:
        group, ordinal = place
        if kind is not Rollout:
            values["evaluation"] = ordinal < 0
        return kind(group=group, ordinal=ordinal, **values)

    return st.builds(build, place=places, attempt=attempts, **fields)


prompts = placed(
    Prompt, row=numbers, samples=st.integers(1, 2**16), least=versions, token_ids=int_arrays(),
    seed=numbers, temperature=st.floats(0, 1e9), top_p=st.floats(0, 1, exclude_min=True),
    max_tokens=st.integers(1, 2**40), gold=words, checker=words, boxed=st.booleans(), text=words,
)  # fmt: skip
rollouts = placed(Rollout, generator=words, failure=words)
judgements = st.builds(
    Judged, outcome=OUTCOMES, extracted=words, reason=words, reward=finite, penalty=finite,
    length=st.integers(0, 2**40), truncated=st.booleans(), oldest=versions, newest=versions,
    generator=words, answer=words,
)  # fmt: skip
verdicts = placed(
    Verdict, fate=FATES, reason=words, samples=st.lists(judgements, max_size=3),
    verifier=words,
)  # fmt: skip
records = st.one_of(prompts, samples(), rollouts, judgements, verdicts)


def a_prompt(ordinal: int = 3, attempt: int = 0, samples: int = 4, least: int = 0) -> Prompt:
    return Prompt(
        group=str(ordinal), ordinal=ordinal, attempt=attempt, evaluation=False, row=0,
        samples=samples, least=Version(1, least), token_ids=np.arange(1, 6, dtype=np.int32),
        seed=1, temperature=1.0, top_p=1.0, max_tokens=32, gold="4", checker="math", boxed=True,
        text="2+2=?",
    )  # fmt: skip


def a_sample(length: int = 3, version: Version = FIRST) -> Sample:
    return Sample(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.linspace(-1, 0, length, dtype=np.float32),
        spans=[Span(*version, 0, length)] if length else [],
        finish_reason="stop", text="4", generator="g", seconds=0.1,
    )  # fmt: skip


def a_judgement(outcome: Any = "correct", length: int = 3, version: Version = FIRST) -> Judged:
    return Judged(
        outcome=outcome, extracted="4", reason="", reward=1.0 if outcome == "correct" else -1.0,
        penalty=0.0, length=length, truncated=False, oldest=version, newest=version, generator="g",
    )  # fmt: skip


def a_verdict(
    ordinal: int = 3, attempt: int = 0, fate: Any = "accepted", reason: str = "mixed",
    outcomes: tuple[str, ...] = ("correct", "wrong", "wrong", "correct"),
) -> Verdict:  # fmt: skip
    judged = [a_judgement(outcome) for outcome in outcomes]
    return Verdict(str(ordinal), ordinal, attempt, False, fate, reason, judged, "v")


def a_stored_group(ordinal: int, attempt: int = 0, lengths: tuple[int, ...] = (3, 2, 5, 1)) -> Any:
    """A group as a batch file holds it, its verdict in line with its samples."""
    judged = [
        a_judgement("correct" if index % 2 else "wrong", length)
        for index, length in enumerate(lengths)
    ]
    verdict = Verdict(str(ordinal), ordinal, attempt, False, "accepted", "mixed", judged, "v")
    payloads = [encode(a_sample(length)) for length in lengths]
    prompt = a_prompt(ordinal, attempt, samples=len(lengths))
    return StoredGroup(ordinal, attempt, encode(prompt), encode(verdict), payloads)
