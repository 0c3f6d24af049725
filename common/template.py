"""How a problem is put to the model: the templates, and instructions that it brings along.

Rows of verl's data sets may carry the paper's instruction inside the prompt. It is taken off
where the template adds it, so that a model never reads it twice.
"""

from __future__ import annotations

import re
from typing import Any

from common.errors import DataError
from common.problem_files import Conversation, Message

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{prompt}\n\nRemember to put your answer on its own line after "Answer:".'
)


def _part(text: str) -> str:
    """A pattern for a part of the instruction, with any white space between its words."""
    return r"\s+".join(map(re.escape, text.split()))


_BEFORE, _AFTER = map(_part, DAPO_TEMPLATE.split("{prompt}"))
_CARRIED = re.compile(rf"\A\s*{_BEFORE}\s*|\s*{_AFTER}\s*\Z")
_OWN = re.compile(
    r"""Answer:\s*\\?\\boxed      # the form of an answer, written out
    |<final[_ ]answer>
    |after\s+["'“`]*\#{4}         # GSM8K's form
    |\\boxed\{\s*(?:\.{3}|\\ldots)?\s*\}
    |(?:within|inside|in)\s+[`$]*\\boxed
    """,
    re.VERBOSE | re.IGNORECASE,
)


def bare(text: str) -> str:
    """A prompt without the paper's instruction, if it carries that and something else."""
    return _CARRIED.sub("", text) or text


def carries_dapo(text: str) -> bool:
    """Whether a prompt carries the paper's instruction, or one of its two parts."""
    return _CARRIED.search(text) is not None


def own_instruction(text: str) -> str | None:
    """Where a prompt asks for a form of the answer by itself, other than the paper's."""
    found = _OWN.search(bare(text))
    return found and found[0]


def bare_conversation(prompt: Conversation) -> Conversation:
    """A conversation whose last message is bare."""
    return (*prompt[:-1], Message(prompt[-1].role, bare(prompt[-1].content)))


def render(prompt: Conversation, tokenizer: Any, template: str) -> str:
    """The text that the model continues.

    `raw` is the prompt as it is, `chat` the tokenizer's chat template around it, `dapo` the
    paper's instruction around the last message and then the chat template.

    Raises:
        DataError: the tokenizer has no chat template, or a conversation has no raw text.
    """
    if template == "raw":
        if len(prompt) > 1:
            raise DataError(
                f'data.template = "raw" takes a plain text and not {len(prompt)} messages; use '
                'data.template = "chat"'
            )
        return prompt[0].content
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"data.template = {template!r} needs a chat template, and the tokenizer has none; "
            'use data.template = "raw"'
        )
    if template == "dapo":
        content = DAPO_TEMPLATE.format(prompt=bare(prompt[-1].content))
        prompt = (*prompt[:-1], Message(prompt[-1].role, content))
    text: str = tokenizer.apply_chat_template(
        [message._asdict() for message in prompt], tokenize=False, add_generation_prompt=True
    )
    return text
