"""Templates: what is put around a prompt, and what the prompt brings along."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from common.problem_files import Message
from common.template import DAPO_TEMPLATE, bare, carries_dapo, own_instruction, render


class Silent:
    chat_template: str | None = None


class Chatting(Silent):
    chat_template = "some"

    def apply_chat_template(self, turns: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in turns) + "<assistant>"


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def test_the_templates_wrap_a_prompt_without_touching_its_braces() -> None:
    prompt = "Let {x} be \\frac{1}{2}."
    assert render(user(prompt), Silent(), "raw") == prompt
    assert render(user(prompt), Chatting(), "chat") == f"<user>{prompt}<assistant>"
    dapo = render(user(prompt), Chatting(), "dapo")
    assert dapo.startswith("<user>Solve the following math problem step by step.")
    assert f"\n\n{prompt}\n\nRemember" in dapo


def test_the_instruction_goes_around_the_last_message_of_a_conversation() -> None:
    text = render((Message("system", "Be brief."), *user("2+2?")), Chatting(), "dapo")
    assert text.startswith("<system>Be brief.<user>Solve the following")
    assert "\n\n2+2?\n\nRemember" in text


def test_a_prompt_that_carries_the_instruction_does_not_get_it_twice() -> None:
    carried = DAPO_TEMPLATE.format(prompt="What is 2+2?")
    once = render(user("What is 2+2?"), Chatting(), "dapo")
    assert render(user(carried), Chatting(), "dapo") == once
    assert render(user(carried), Chatting(), "chat") == once
    assert render(user(carried), Silent(), "raw") == carried


@given(prompt=st.text(st.characters(codec="utf-8"), min_size=1).map(str.strip).filter(bool))
def test_any_problem_comes_out_of_the_instruction_as_it_went_in(prompt: str) -> None:
    assert bare(DAPO_TEMPLATE.format(prompt=prompt)) == prompt
    assert carries_dapo(DAPO_TEMPLATE.format(prompt=prompt))
    assert bare(prompt) == prompt


def test_the_instruction_is_found_by_half_and_with_other_white_space() -> None:
    before, after = DAPO_TEMPLATE.split("{prompt}")
    assert bare(f"{before}a") == bare(f"a{after}") == "a"
    assert bare(DAPO_TEMPLATE.format(prompt="a").replace("\n\n", " \n ").replace(" ", "  ")) == "a"
    assert bare(DAPO_TEMPLATE.format(prompt="")) == DAPO_TEMPLATE.format(prompt="")


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("请以“Answer: \\boxed{<final_answer>}”的格式输出", True),
        ('Let\'s think step by step and output the final answer after "####".', True),
        ("Please put your final answer within \\boxed{}.", True),
        (DAPO_TEMPLATE.format(prompt="What is 2+2?"), False),
        ("Let $\\boxed{N}$ mean the number of divisors of $N$.", False),
        ("$$\\boxed{0|999}\\quad\\boxed{1|998}\\quad\\ldots$$ How many signs are there?", False),
    ],
)
def test_prompts_that_ask_for_a_form_of_the_answer_are_told_from_mere_boxes(
    text: str, own: bool
) -> None:
    assert bool(own_instruction(text)) is own


@pytest.mark.parametrize("template", ["dapo", "chat"])
def test_a_chat_template_that_the_tokenizer_lacks_is_a_data_error(template: str) -> None:
    with pytest.raises(DataError, match=r'use data\.template = "raw"'):
        render(user("a"), Silent(), template)
