"""The number of decode slots that the measured step time gives, and weights in an engine that goes by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from engine.core.core import EngineConfig
from engine.messages import StepTime, Submit
from engine.scheduling.compose.auto_slots import RENEWED_EVERY, AutoSlots, RowCost, fair_pair, slots_for
from engine.scheduling.options import PolicyOptions
from engine.virtual.replica import VirtualReplica

PLACES = 32
CPU = RowCost(2.0e-3, 0.2e-3)
"""About what the shipped model takes on two cores."""


def share(cost: RowCost, slots: int) -> float:
    return cost.tokens_per_s(slots) / cost.tokens_per_s(PLACES)


def test_the_fewest_rows_that_keep_nine_tenths_of_the_throughput() -> None:
    for fixed_s in (1.1e-3, 2e-3, 3e-3, 4e-3):
        cost = replace(CPU, fixed_s=fixed_s)
        slots = slots_for(cost, PLACES)
        assert share(cost, slots - 1) < 0.9 <= share(cost, slots)


def test_rows_that_cost_nothing_all_stay_and_dear_ones_leave_half_of_the_places() -> None:
    assert slots_for(RowCost(25e-3, 10e-6), PLACES) == 0
    assert slots_for(RowCost(1e-6, 1e-3), PLACES) == PLACES // 2
    assert slots_for(RowCost(1e-6, 1e-3), 1) == 0


def test_where_steps_are_padded_the_number_is_a_captured_size() -> None:
    """Rows up to it take no longer, and fewer would be padded to it."""
    assert slots_for(CPU, PLACES) == 22
    for sizes, slots in (((16, 24, 32), 24), ((16, 22, 32), 22), ((16, 32), 0), ((8, 16), 22), ((64,), 0)):
        assert slots_for(replace(CPU, sizes=sizes), PLACES) == slots
    padded = replace(CPU, sizes=(16, 24, 32))
    assert padded.step_s(22) == padded.step_s(24) == CPU.step_s(24)


def test_context_is_a_part_of_a_row() -> None:
    step_time = StepTime(2e-3, 40e-6, 1e-6, 60e-6, samples=1000, relative_error=0.0)
    assert RowCost.of(step_time, 1000).row_s == pytest.approx(1.1e-3)


def test_a_number_in_force_stays_until_the_model_has_clearly_changed() -> None:
    now = slots_for(CPU, PLACES)
    for factor in (0.85, 1.08):
        close = replace(CPU, fixed_s=CPU.fixed_s * factor)
        assert slots_for(close, PLACES) != now == slots_for(close, PLACES, now)
    dearer, cheaper = replace(CPU, fixed_s=3e-3), replace(CPU, fixed_s=0.9e-3)
    assert slots_for(dearer, PLACES, now) == slots_for(dearer, PLACES) > now
    assert slots_for(cheaper, PLACES, now) == slots_for(cheaper, PLACES) < now
    # Nearly free rows: whether all have one stays as it is.
    between = RowCost(10e-3, 150e-6)
    assert (slots_for(between, PLACES), slots_for(between, PLACES, 29)) == (0, 29)


def test_all_rows_until_a_full_batch_was_learned_from() -> None:
    auto = AutoSlots()
    for running, rows in ((32, 0), (16, 0), (17, slots_for(CPU, PLACES)), (1, slots_for(CPU, PLACES))):
        auto.renew(CPU, running, PLACES)
        assert auto.rows == rows


# ---------------------------------------------------------------- in an engine


class Engine:
    """Endless answers of weights 1 and 3 on a virtual machine."""

    def __init__(self, cost: RowCost = CPU, heavy: int = 16, tier: int = 1, **options: Any) -> None:
        """`heavy` of the streams have the weight 3, and that tier."""
        config = EngineConfig(policy_options=PolicyOptions(**options), max_sequences=PLACES)
        step_time = StepTime(cost.fixed_s, cost.row_s / 4, 0.0, cost.row_s * 3 / 4, 0, 0.0, cost.sizes)
        self.replica = VirtualReplica(config, num_blocks=20_000, step_time=step_time, context_tokens=9_000)
        self.begin("heavy", heavy, weight=3.0, tier=tier)
        self.steps(50)
        self.begin("light", PLACES - heavy)

    def begin(self, tenant: str, count: int, **terms: Any) -> None:
        for number in range(count):
            submit = Submit(
                sequence_id=f"{tenant}{number}", request_id=f"{tenant}{number}", tenant_id=tenant,
                prompt_token_ids=[1] * 4, max_tokens=8_000, lease_tokens=8_000, **terms,
            )  # fmt: skip
            assert self.replica.submit(submit) is None

    def steps(self, count: int) -> list[Counter[str]]:
        """Tokens of each step by tenant."""
        return [
            Counter({tenant: each.decoded_tokens for tenant, each in self.replica.step().shares.items()})
            for _ in range(count)
        ]

    def rate(self, count: int) -> float:
        since_s = self.replica.clock.now_s
        return sum(served.total() for served in self.steps(count)) / (self.replica.clock.now_s - since_s)


def off(steps: list[Counter[str]], ratio: float, width: int = 1000) -> float:
    """Furthest from heavy : light = `ratio` in any window."""
    found = []
    for begin in range(0, len(steps) - width + 1, 50):
        window = steps[begin : begin + width]
        found.append(sum(step["heavy"] for step in window) / sum(step["light"] for step in window))
    return max(abs(each / ratio - 1) for each in found)


def test_by_default_weights_act_in_a_full_batch_and_nine_tenths_of_the_throughput_stay() -> None:
    engine = Engine()
    before = engine.steps(2 * RENEWED_EVERY - 50)
    assert off(before[50:], 1.0, 400) < 0.01
    slots = engine.replica.core.table.most_decodes
    assert slots_for(CPU, PLACES) <= slots <= slots_for(CPU, PLACES) + 1
    engine.steps(200)
    light, heavy = fair_pair(16, 16, 3.0, slots)
    assert off(engine.steps(2500), heavy / light) < 0.03
    assert engine.rate(1000) >= 0.88 * Engine(slots=0).rate(1000)
    told = engine.replica.core.explain().decode_slots
    assert told is not None
    assert (told.slots, told.places, told.is_auto) == (slots, PLACES, True)
    assert told.tokens_per_s == pytest.approx(engine.rate(1000), rel=0.03)
    assert told.all_tokens_per_s == pytest.approx(CPU.tokens_per_s(PLACES), rel=0.03)


def test_with_half_the_places_shares_are_exact() -> None:
    engine = Engine(slots=PLACES // 2)
    engine.steps(200)
    assert off(engine.steps(2000), 3.0) < 0.01


def test_in_a_half_empty_batch_no_stream_sits_out() -> None:
    engine = Engine()
    engine.steps(3 * RENEWED_EVERY)
    for number in range(8):
        engine.replica.core.cancel(f"light{number}")
        engine.replica.core.cancel(f"heavy{number}")
    assert engine.steps(1000) == [Counter(light=8, heavy=8)] * 1000


def test_a_higher_tiers_streams_have_their_slots_and_the_lowest_tier_one() -> None:
    engine = Engine(heavy=30, tier=0)
    engine.steps(3 * RENEWED_EVERY)
    each = engine.steps(200)
    assert {served["heavy"] for served in each} == {30}
    assert {served["light"] for served in each} <= {1, 2}


def test_the_step_that_renews_the_number_has_all_rows() -> None:
    engine = Engine()
    engine.steps(2 * RENEWED_EVERY - 50)
    totals = [served.total() for served in engine.steps(RENEWED_EVERY)]
    assert totals[-1] == PLACES
    assert set(totals[:-1]) == {engine.replica.core.table.most_decodes}


def test_a_padded_engine_fills_its_steps() -> None:
    """It learns what they cost from padded ones, and says how far they were padded."""
    sizes = (1, 8, 28, PLACES)
    engine = Engine(replace(CPU, sizes=sizes))
    core = engine.replica.core
    assert core.snapshot("e").step_time.graph_sizes == sizes
    engine.steps(3 * RENEWED_EVERY - 50)
    assert {served.total() for served in engine.steps(200)} == {28}
    for number in range(12):
        core.cancel(f"light{number}")
    engine.steps(10)
    assert [(sum(step.decodes.values()), step.padding_tokens) for step in core.step_log.last(200)[::199]] == [
        (28, 0),
        (20, 8),
    ]
    fit = core.step_time.to_message()
    assert fit.per_token_s + fit.per_sequence_s == pytest.approx(CPU.row_s, rel=0.02)


def test_a_number_chosen_before_the_model_knew_fewer_rows_is_given_up() -> None:
    """All came at once: what rows cost is the model's prior, until steps of fewer were seen."""
    engine = Engine(RowCost(25e-3, 10e-6), heavy=32)
    engine.steps(2 * RENEWED_EVERY)
    assert engine.replica.core.table.most_decodes < PLACES
    engine.steps(RENEWED_EVERY)
    assert engine.replica.core.table.most_decodes == PLACES


def test_what_was_learned_of_full_batches_outlives_a_quiet_time() -> None:
    engine = Engine(RowCost(25e-3, 10e-6))
    engine.steps(3 * RENEWED_EVERY - 50)
    for number in range(16):
        engine.replica.core.cancel(f"light{number}")
    engine.steps(20 * RENEWED_EVERY - 2)
    engine.begin("late", 16)
    engine.steps(3)
    assert engine.replica.core.table.most_decodes == PLACES
