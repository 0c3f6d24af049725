"""Start-up checks that need the tokenizer: template, vocabulary, stop tokens, rows."""

from __future__ import annotations

import re
from pathlib import Path

from common.data import load_rows
from common.errors import ConfigError
from common.problem_files import Message
from common.stop_tokens import end_of_turn, stop_token_ids
from common.subject import Note, Subject
from common.template import render

_LATER = "checked where the model is"
_MARKER = re.compile(r"<\|[^<>|\s]+\|>")
"""How chat templates write their special tokens: <|im_start|> and the like."""


def template(subject: Subject) -> str:
    """The prompt template applied to a problem.

    Raises:
        DataError: it needs a chat template, and the tokenizer has none.
    """
    if not subject.here:
        return _LATER
    text = _rendered(subject)
    count = len(subject.tokenizer.encode(text, add_special_tokens=_raw(subject)))
    return f"data.template = {subject.config.data.template} adds {count} tokens to a prompt"


def vocabulary(subject: Subject) -> str:
    """Tokens of the tokenizer and of the template against the rows of the embedding."""
    if not subject.here:
        return _LATER
    known: dict[str, int] = subject.tokenizer.get_vocab()
    shape = subject.architecture
    largest = max(known.values())
    if shape and largest >= shape.vocabulary:
        raise ConfigError(
            f"the tokenizer in {subject.model_dir} has token {largest}, the model's embedding only "
            f"{shape.vocabulary} rows; take tokenizer and weights of model.path from one model"
        )
    broken = sorted({*_MARKER.findall(_rendered(subject))} - {*known})
    if broken:
        raise ConfigError(
            f"the chat template of {subject.model_dir} writes {', '.join(broken)}, which the "
            "tokenizer does not know and would take apart; use the model's own chat template, or "
            'data.template = "raw"'
        )
    return f"{len(known)} tokens, {shape.vocabulary if shape else 'unknown'} rows"


def end_of_responses(subject: Subject) -> str:
    """Stop tokens of the engine against the token that ends a turn in the chat template."""
    if not subject.here:
        return _LATER
    stops = stop_token_ids(
        subject.model_dir, subject.tokenizer, subject.config.sampling.stop_tokens
    )
    names = {number: text for text, number in subject.tokenizer.get_vocab().items()}
    told = ", ".join(f"{names.get(stop, 'unknown')} ({stop})" for stop in stops)
    if _raw(subject):
        return f"any of {told}"
    ending = end_of_turn(subject.tokenizer)
    if ending is None:
        return Note(f"any of {told}; the chat template ends a turn with no token of its own")
    if subject.tokenizer.get_vocab()[ending] not in stops:
        raise ConfigError(
            f"the chat template ends a turn with {ending}, and responses end with {told} alone: "
            f'they would run on to the cap; set sampling.stop_tokens = ["{ending}"]'
        )
    return f"any of {told}; the chat template ends a turn with {ending}"


def data_rows(subject: Subject) -> str:
    """Every row of the data files, as the learner will read it.

    Raises:
        DataError: a row that cannot be used; the message names the file and the row.
    """
    from learner.heldout import load_heldout

    config = subject.config
    files = [*config.data.train, *(config.data.heldout or [])]
    if not subject.here or not all(Path(name).exists() for name in files):
        return "checked where model and data are"
    limit, verifier = config.max_prompt_tokens, config.verifier
    train = load_rows(
        config.data.train, subject.tokenizer, config.data.template, limit,
        verifier.checker, verifier.boxed, drop_long=True,
    )  # fmt: skip
    heldout = load_heldout(config, subject.tokenizer)
    longest = max(len(row.token_ids) for row in train)
    return (
        f"{len(train)} to train on, the longest prompt has {longest} of {limit} tokens; "
        f"{sum(map(len, heldout.values()))} held out"
    )


def _raw(subject: Subject) -> bool:
    return subject.config.data.template == "raw"


def _rendered(subject: Subject) -> str:
    """The template around an empty problem."""
    return render((Message("user", ""),), subject.tokenizer, subject.config.data.template)
