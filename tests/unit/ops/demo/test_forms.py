"""Tests of the demo's questions for a form: their right answers are valid, others are not."""

from __future__ import annotations

import random

from ops.demo.forms import ASKED, _is_valid, _questions


def test_right_answers_are_valid_and_others_are_not() -> None:
    questions = list(_questions(random.Random(1)))
    assert [question.form for question in questions].count("calls") == ASKED
    for question in questions:
        right = question.right
        assert _is_valid(right, question)
        others = [right[:-1], right.replace("{", "[", 1), right.replace('{"', '{"un', 1), "", "1", "[]", "{}"]
        others.append(right.replace(":", ':null,"x":', 1))
        assert not [other for other in others if _is_valid(other, question)]


def test_a_cut_answer_has_room_for_its_empty_form() -> None:
    cut = [question for question in _questions(random.Random(2)) if question.form == "cut"]
    assert all(
        question.body["max_tokens"] >= len('{"":0}') + len("".join(question.schema["required"]))
        for question in cut
    )
    assert sum(question.body["max_tokens"] < len(question.right) for question in cut) > ASKED // 2
