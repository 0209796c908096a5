"""Rates, latencies, ratios and agreement of the engine benchmark."""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench.common.report import rotated, spread
from ops.bench.engine.metrics import BadAnswers, agreement, measure, ratios


def order(prompt: int, output: int, arrival_s: float = 0.0) -> dict[str, Any]:
    return {"prompt_token_ids": [7] * prompt, "output_tokens": output, "arrival_s": arrival_s}


def answer(*token_s: float) -> dict[str, Any]:
    return {"token_ids": [1] * len(token_s), "token_s": list(token_s)}


def test_rates_and_latencies_of_one_run() -> None:
    found = measure(
        [order(5, 3, arrival_s=1.0), order(2, 1, arrival_s=3.0)], [answer(1.5, 2.5, 2.75), answer(4.0)]
    )
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 7, 4)
    assert found["wall_s"] == 4.0
    assert found["output_tokens_per_s"] == 1.0
    assert found["ttft_s"] == {"mean": 0.75, "p50": 0.5, "p99": 1.0}
    assert found["e2e_s"] == {"mean": 1.375, "p50": 1.0, "p99": 1.75}
    assert found["tpot_s"] == {"mean": 0.625, "p50": 0.625, "p99": 0.625}, "one answer has no second token"
    assert found["itl_s"] == {"mean": 0.625, "p50": 0.25, "p99": 1.0}


def test_answers_of_one_token_have_no_gaps() -> None:
    found = measure([order(1, 1)], [answer(0.5)])
    assert found["itl_s"] == found["tpot_s"] == {"mean": None, "p50": None, "p99": None}


@pytest.mark.parametrize(
    "answers",
    [
        [answer(0.1, 0.2)],
        [answer(0.1, 0.2), answer(0.1, 0.2, 0.3)],
        [answer(0.1, 0.2), {"token_ids": [1, 2], "token_s": [0.1]}],
    ],
)
def test_an_answer_that_is_not_what_was_asked_is_no_figure(answers: list[dict[str, Any]]) -> None:
    with pytest.raises(BadAnswers):
        measure([order(1, 2), order(1, 2)], answers)


def run_of(tokens_per_s: float, ttft_p99: float, tpot: float | None = 0.01) -> dict[str, Any]:
    points = {"p50": ttft_p99 / 2, "p99": ttft_p99}
    return {
        "output_tokens_per_s": tokens_per_s,
        "ttft_s": points,
        "e2e_s": points,
        "itl_s": {"p50": tpot, "p99": tpot},
        "tpot_s": {"p50": tpot, "p99": tpot},
    }


def test_ratios_are_of_runs_of_equal_number() -> None:
    ours = [run_of(200, 1.0), run_of(300, 2.0), run_of(100, 9.0)]
    theirs = [run_of(100, 2.0), run_of(100, 1.0), run_of(100, 3.0)]
    found = ratios(ours, theirs)
    assert found["output_tokens_per_s"] == {"median": 2.0, "least": 1.0, "most": 3.0, "values": [2, 3, 1]}
    assert found["ttft_p99"] == {"median": 2.0, "least": 0.5, "most": 3.0, "values": [0.5, 2.0, 3.0]}
    assert found["tpot_p50"]["median"] == 1.0


def test_a_latency_that_one_side_does_not_have_has_no_ratio() -> None:
    found = ratios([run_of(1, 1, None), run_of(1, 1)], [run_of(1, 1), run_of(1, 1)])
    assert "tpot_p99" not in found
    assert "ttft_p99" in found


def test_no_values_have_no_spread() -> None:
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_tokens_agree_up_to_the_first_that_differs() -> None:
    ours = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    theirs = [[1, 2, 9, 4], [5, 6], [0, 8, 9]]
    found = agreement(ours, theirs)
    assert found["identical_requests"] == 1
    assert found["first_divergences"] == [{"request": 0, "token": 2}, {"request": 2, "token": 0}]
    assert found["compared_tokens"] == 3 + 2 + 1, "after a divergence the contexts differ"
    assert found["divergences_per_token"] == pytest.approx(2 / 6)
    assert found["distinct_tokens"] == 9


def test_an_answer_that_ends_early_diverges_where_it_ends() -> None:
    assert agreement([[1, 2, 3]], [[1, 2]])["first_divergences"] == [{"request": 0, "token": 2}]


def test_each_repetition_begins_with_another_engine() -> None:
    names = ["ours", "a", "b"]
    orders = [rotated(names, repetition) for repetition in range(4)]
    assert [first for first, *_ in orders] == ["ours", "a", "b", "ours"]
    assert all(sorted(each) == sorted(names) for each in orders)
