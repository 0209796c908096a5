"""The live benchmark of the control loop: what it sends, how it judges, and the simulator beside it."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from gateway.flow.control_rules import ControlMode
from gateway.flow.knobs import Knob
from ops.bench.estimates.control import served
from ops.bench.estimates.control_live import (
    CALM_LOAD,
    LET_GO_S,
    TOKENS_PER_S,
    computed,
    could_share,
    judge,
    live_case,
    per_s,
    plan,
    sizes,
)
from ops.simulate.traffic.requests import SimulatedRequest

OVERLOAD_S = 120.0
SEEDS = range(1, 5)


def overload(seed: int, *, then_calm: bool = False) -> list[SimulatedRequest]:
    asked = sizes(seed)
    requests = plan([f"load-{seed}-0"], asked, per_s(1.4, asked), OVERLOAD_S)
    calm = plan([f"calm-{seed}-0"], asked, per_s(CALM_LOAD, asked), 3 * LET_GO_S)
    return requests + [replace(each, arrival_s=OVERLOAD_S + each.arrival_s) for each in calm if then_calm]


def test_acting_serves_most_of_what_could_have_been_in_time() -> None:
    could, in_time = [], []
    for seed in SEEDS:
        requests = overload(seed)
        case = live_case(requests, OVERLOAD_S)
        records = served(case, ControlMode.ACTING)[0].records
        could.append(could_share(requests, OVERLOAD_S))
        in_time.append(mean(case.slo.met(records, row) for row in range(len(records))))
    assert mean(in_time) > 0.85 * mean(could)


def test_strictness_lets_go_within_seconds_of_the_overloads_end() -> None:
    refused_after = refused_before = 0
    for seed in SEEDS:
        case = live_case(overload(seed, then_calm=True), OVERLOAD_S)
        pool, moves = served(case, ControlMode.ACTING)
        records = pool.records
        refused = [
            at_s for at_s, is_refused in zip(records.arrival_s, records.refused, strict=True) if is_refused
        ]
        refused_before += sum(at_s < OVERLOAD_S for at_s in refused)
        refused_after += sum(at_s >= OVERLOAD_S + LET_GO_S for at_s in refused)
        strictness = {move.at_s: move.after for move in moves if move.knob is Knob.ADMISSION}
        assert strictness[max(strictness)] < 1
        assert max(strictness) < OVERLOAD_S + 2 * LET_GO_S
    assert refused_before > 100
    assert refused_after == 0


def test_a_plan_is_in_order_and_each_client_sends_the_sizes_in_turn() -> None:
    asked = sizes(1)
    planned = plan(["a", "b"], asked, 10.0, 20.0)
    assert 150 < len(planned) < 250
    assert [each.arrival_s for each in planned] == sorted(each.arrival_s for each in planned)
    assert planned[-1].arrival_s < 20.0
    for tenant in ("a", "b"):
        own = [(each.input_tokens, each.output_tokens) for each in planned if each.tenant == tenant]
        assert own == [asked[number % len(asked)] for number in range(len(own))]


def test_capacity_and_what_could_have_been_are_in_tokens_that_the_engine_computes() -> None:
    asked = [(2, 4), (6, 14)]
    assert [computed(size) for size in asked] == [5, 19]
    assert per_s(1.2, asked) == pytest.approx(1.2 * TOKENS_PER_S / 12)
    requests = [SimulatedRequest(float(number), "a", 6, 14) for number in range(10)]
    assert could_share(requests, 5.0) == pytest.approx(100 / 190)
    assert could_share(requests, 500.0) == 1.0


def test_only_what_acts_is_judged_and_a_refusal_after_the_overload_fails() -> None:
    off: dict[str, Any] = {"mode": "off", "could": 0.7, "in_time": 0.1, "refused_later": 0}
    acting = off | {"mode": "acting", "in_time": 0.6}
    assert judge([off, acting], 0.85)["ok"]
    assert not judge([off, acting | {"in_time": 0.59}], 0.85)["ok"]
    assert not judge([off, acting, acting | {"refused_later": 1}], 0.85)["ok"]
