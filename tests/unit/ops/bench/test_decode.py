"""Figures of token-fair decoding, from made-up steps."""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench.fairness import decode
from ops.sandbox import step_shares


def step(number: int, **fields: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "decodes": {},
        "prompts": {},
        "left_tokens": 0,
        "waiting_decodes": {},
        "waiting_prompt_tokens": {},
        "waiting": {},
        "longest_gap_steps": {},
    }
    return empty | {"step": number} | fields


def test_steps_that_are_read_twice_count_once_and_dropped_ones_are_noticed() -> None:
    steps = step_shares.merged([step(1), step(2)], [step(2), step(5)])
    assert [each["step"] for each in steps] == [1, 2, 5]
    assert step_shares.lost_steps(steps) == 2
    assert step_shares.lost_steps(steps[:2]) == 0


def test_only_steps_after_the_last_prompt_and_the_pause_are_measured() -> None:
    steps = [step(1, prompts={"a": 5}), *(step(number) for number in range(2, 8))]
    assert [each["step"] for each in step_shares.after_prompts(steps, 3)] == [5, 6, 7]


def test_the_worst_window_counts() -> None:
    fair = [step(number, decodes={"a": 1, "b": 3}) for number in range(8)]
    unfair = [step(number, decodes={"a": 2, "b": 3}) for number in range(8, 12)]
    assert step_shares.worst_ratio(fair, "a", "b", 3.0, 4) == 0
    assert step_shares.worst_ratio(fair + unfair, "a", "b", 3.0, 4) == 0.5
    due = step_shares.max_min([{"slots": 4}, {"slots": 512}] * 4, 2, 3.0)
    assert due == [(2, 2), (2, 2)] * 4
    assert step_shares.worst_ratio(fair, "a", "b", due, 4) == 2
    assert step_shares.worst_ratio([step(1, decodes={"b": 3})] * 4, "a", "b", 3.0, 4) == float("inf")
    with pytest.raises(ValueError, match="3 steps are fewer than a window of 4"):
        step_shares.worst_ratio(fair[:3], "a", "b", 3.0, 4)


def test_rounds_of_a_tenant_follow_from_its_part_of_the_slots() -> None:
    assert step_shares.most_rounds(32, 16, 1.0, 4.0) == 9
    assert step_shares.most_rounds(32, 16, 3.0, 4.0) == 4
    assert step_shares.longest_gap([step(1, longest_gap_steps={"a": 3}), step(2)], "a") == 3


def test_a_tenant_below_its_half_has_a_deficit_that_what_it_had_before_does_not_hide() -> None:
    steps = [step(1, decodes={"b": 4}, prompts={"a": 2}), step(2, decodes={"b": 4}, prompts={"a": 12})]
    assert step_shares.least_surplus(steps, "a", 0.5) == -1
    assert step_shares.both_work([*steps, step(3, decodes={"b": 4})], "a", "b") == steps


def test_what_a_step_left_over_beside_an_unfinished_prompt_is_counted() -> None:
    steps = [step(1, left_tokens=7), step(2, left_tokens=5, waiting_prompt_tokens={"a": 1})]
    assert step_shares.idle_tokens(steps, "a") == 5
    assert step_shares.without_token([step(1, waiting_decodes={"b": 2})], "b") == 2
    assert step_shares.not_begun([step(1, waiting={"b": 1})], "b") == 1


def test_the_report_fails_where_the_control_is_not_even() -> None:
    turns: dict[str, Any] = {
        "steps": 2000,
        "lost_steps": 0,
        "slots": [32],
        "tokens_per_s": 4000.0,
        "off_max_min": 0.0,
        "decode_tokens": {"light": 1000, "heavy": 3000},
        "off_1_to_3": 0.0,
        "off_1_to_1": 2.0,
        "longest_gap_steps": {"light": 4, "heavy": 2},
    }
    default = turns | {"off_1_to_3": 0.5, "tokens_per_s": 3600.0}
    control = turns | {"off_1_to_1": 0.0}
    alone = {"requests": 9, "ttft_s": None, "tpot_s": {"p5": 0.01, "p50": 0.01, "p95": 0.02}}
    beside = alone | {
        "lost_steps": 0, "least_surplus_tokens": -10.0, "largest_chunk_tokens": 256, "idle_tokens": 0,
        "short_without_token": 0, "short_not_begun": 0,
    }  # fmt: skip
    report = decode._report(default, turns, control, alone, beside)
    assert report["ok"]
    decode.show(report)
    assert not decode._report(default, turns, turns, alone, beside)["ok"]
    assert not decode._report(default, turns, control, alone, beside | {"short_not_begun": 1})["ok"]
    for worse in ({"off_max_min": 0.04}, {"tokens_per_s": 3500.0}):
        assert not decode._report(default | worse, turns, control, alone, beside)["ok"]
