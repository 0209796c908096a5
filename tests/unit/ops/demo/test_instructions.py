"""Tests of the demo's instructions: seed, answers, split and lengths."""

from __future__ import annotations

import json
import random
import re
from itertools import islice, pairwise

import pytest

from ops.demo.prompts.instructions import (
    DAYS,
    FAMILIES,
    LARGEST_COUNTED,
    LONGEST_ANSWER_TOKENS,
    LONGEST_PROMPT_TOKENS,
    MONTHS,
    TEMPLATE_TOKENS,
    decorate,
    is_held_out,
    make_instruction,
    prompt_for_lengths,
)
from ops.demo.prompts.phrases import filler_words
from ops.demo.training.streams import SETTLING_SHARE, courtesies, held_out_instructions, training_stream


def count_like_the_model(text: str) -> int:
    """About what the demo tokenizer counts: a token per digit, sign and line, and per filler word."""
    tokens = 0
    for word in text.replace("\n", " \n ").split(" "):
        letters = sum(character.isalpha() for character in word)
        tokens += (1 if letters else 0) + sum(not character.isalpha() for character in word)
    return max(1, tokens)


def test_the_same_seed_gives_the_same_instructions() -> None:
    assert list(islice(training_stream(7), 300)) == list(islice(training_stream(7), 300))
    assert list(islice(training_stream(7), 300)) != list(islice(training_stream(8), 300))
    assert held_out_instructions("sort", 50, 1) == held_out_instructions("sort", 50, 1)


def test_no_training_instruction_is_held_out() -> None:
    rows = list(islice(training_stream(3, share=SETTLING_SHARE), 5_000))
    measured = [row for row in rows if row.family != "courtesy"]
    assert not [row.key for row in measured if is_held_out(row.key)]
    assert {row.family for row in rows} == {*FAMILIES, "courtesy"}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_200_distinct_held_out_instructions(family: str) -> None:
    rows = held_out_instructions(family, 200, 0)
    assert len({row.key for row in rows}) == 200
    assert all(is_held_out(row.key) and row.family == family for row in rows)
    trained = {row.key for row in islice(training_stream(3, share=SETTLING_SHARE), 3_000)}
    assert not trained & {row.key for row in rows}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_prompt_and_answer_holds_text(family: str) -> None:
    rng = random.Random(5)
    for _ in range(300):
        row = make_instruction(family, rng, held_out=None)
        assert row.prompt.strip() == row.prompt != ""
        assert row.answer.strip() == row.answer != ""
        if family != "tools":
            assert row.chat() == [{"role": "user", "content": row.prompt}]


def test_answers_are_right() -> None:
    rng = random.Random(11)
    for _ in range(500):
        sum_row = make_instruction("arithmetic", rng, held_out=None)
        sign = "+" if "+" in sum_row.key else "-"
        left, right = map(int, sum_row.key.removeprefix("arithmetic:").split(sign))
        assert int(sum_row.answer) == (left + right if sign == "+" else left - right) >= 0
        spelled = make_instruction("spell", rng, held_out=None)
        assert spelled.answer.replace("-", "") == spelled.key.removeprefix("spell:")
        counted = list(
            map(int, make_instruction("count", rng, held_out=None).answer.replace("\n", ", ").split(", "))
        )
        assert {abs(after - before) for before, after in pairwise(counted)} <= {1}
        assert max(counted) <= LARGEST_COUNTED
        assert make_instruction("facts", rng, held_out=None).answer in ("Yes", "No")


def test_json_answers_are_compact_and_of_what_the_prompt_says() -> None:
    rng = random.Random(12)
    for _ in range(500):
        row = make_instruction("json", rng, held_out=None)
        value = json.loads(row.answer)
        assert row.answer == json.dumps(value, separators=(",", ":"))
        words = re.findall(r'"([^"]+)"', row.answer)
        assert (
            all(word in row.prompt for word in words if word not in ("answer", *value))
            or "days" in row.prompt
        )


def test_calls_name_a_tool_of_the_list_and_its_arguments() -> None:
    rng = random.Random(13)
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool}
    shapes = set()
    for _ in range(1_000):
        row = make_instruction("tools", rng, held_out=None)
        texts = re.findall(r"(\w+)\(([^)]*)\)", row.messages[0].content)
        tools = {name: dict(re.findall(r"(\w+): (\w+)", arguments)) for name, arguments in texts}
        calls = re.findall("<tool_call>(.*)</tool_call>", row.answer)
        for call in map(json.loads, calls):
            wanted = tools[call["name"]]
            assert list(call["arguments"]) == list(wanted)
            assert all(isinstance(call["arguments"][name], kinds[kind]) for name, kind in wanted.items())
        if row.messages[-1].role == "tool":
            assert row.answer.endswith(row.messages[-1].content)
        shapes.add((len(tools), len(calls), row.messages[-1].role))
    assert {(1, 0, "user"), (1, 1, "user"), (3, 1, "user"), (1, 2, "user"), (1, 0, "tool")} <= shapes


def test_yes_and_no_are_about_as_frequent() -> None:
    answers = [row.answer for row in held_out_instructions("facts", 400, 0)]
    assert 0.35 < answers.count("Yes") / len(answers) < 0.65


@pytest.mark.parametrize(("family", "names"), [("days", DAYS), ("months", MONTHS)])
def test_days_and_months_follow_the_calendar(family: str, names: tuple[str, ...]) -> None:
    rng = random.Random(2)
    for _ in range(300):
        row = make_instruction(family, rng, held_out=None)
        listed = [names.index(word) for word in re.findall(r"[A-Z][a-z]+", row.answer)]
        step = -1 if "backwards" in row.prompt else 1
        assert all((before + step) % len(names) == after for before, after in pairwise(listed))
        if (wanted := re.search(r"\d+", row.prompt)) is not None:
            assert len(listed) == int(wanted.group())


def test_decoration_keeps_the_question_and_the_answer() -> None:
    rng = random.Random(4)
    shapes: set[tuple[str, ...]] = set()
    for _ in range(500):
        bare = make_instruction("spell", rng)
        dressed = decorate(bare, rng)
        assert dressed.prompt.endswith(bare.prompt)
        assert (dressed.answer, dressed.key) == (bare.answer, bare.key)
        shapes.add(tuple(message.role for message in dressed.messages))
    assert ("user",) in shapes
    assert ("system", "user") in shapes
    assert ("user", "assistant", "user") in shapes
    with_tools = (decorate(make_instruction("tools", rng), rng).messages for _ in range(200))
    assert all(messages[0].content.startswith("Tools: ") for messages in with_tools)


def test_courtesies_answer_a_greeting() -> None:
    answers = {row.prompt: row.answer for row in courtesies()}
    assert answers["hello"].startswith("Hello!")
    assert "count" in answers["what can you do"]


def test_filler_has_the_wanted_number_of_words() -> None:
    assert [len(filler_words(random.Random(1), number)) for number in (1, 8, 333)] == [1, 8, 333]


def test_prompts_are_made_to_length() -> None:
    rng = random.Random(9)
    for _ in range(150):
        input_tokens, output_tokens = (
            rng.randint(40, LONGEST_PROMPT_TOKENS),
            rng.randint(2, LONGEST_ANSWER_TOKENS),
        )
        row = prompt_for_lengths(rng, input_tokens, output_tokens, count_like_the_model)
        answer_tokens = count_like_the_model(row.answer) + 1
        assert abs(answer_tokens - output_tokens) <= max(2, 0.05 * output_tokens), (row.answer, output_tokens)
        prompt_tokens = count_like_the_model(row.prompt) + TEMPLATE_TOKENS
        assert abs(prompt_tokens - input_tokens) <= 2 or prompt_tokens < 60, (row.prompt, input_tokens)


def test_impossible_lengths_give_the_nearest() -> None:
    rng = random.Random(1)
    assert prompt_for_lengths(rng, 0, 0, count_like_the_model).answer
    longest = prompt_for_lengths(rng, 5_000, 5_000, count_like_the_model)
    assert count_like_the_model(longest.answer) <= LONGEST_ANSWER_TOKENS + 4
    assert count_like_the_model(longest.prompt) <= LONGEST_PROMPT_TOKENS
