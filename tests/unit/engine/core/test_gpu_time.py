"""Shares of a step's time sum to its duration, and recomputation is not charged."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.core import EngineConfig
from engine.core.gpu_time import share_step, split_us
from engine.messages import Delta, StepTime, Submit
from engine.sequence import Sequence
from engine.virtual.replica import VirtualReplica

MODEL = StepTime(0.001, 0.0001, 0.000001, 0.0002, 1, 0.0)


@given(st.integers(0, 10**9), st.lists(st.integers(1, 10**12), min_size=1, max_size=40))
def test_shares_sum_to_the_step_and_are_in_proportion(duration_us: int, weights: list[int]) -> None:
    shares = split_us(duration_us, weights)
    assert sum(shares) == duration_us
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - duration_us * weight / sum(weights)) < 1


def sequence(name: str, *, prompt: int = 100, computed: int = 0, ever: int = 0) -> Sequence:
    made = Sequence.of(Submit(name, name, "t", [1] * prompt, 8, 8), "gw", 0.0)
    made.computed_tokens, made.ever_computed_tokens = computed, max(ever, computed)
    return made


def test_more_tokens_and_more_context_cost_more() -> None:
    prompt, near, far = sequence("prompt"), sequence("near", computed=100), sequence("far", computed=5_000)
    share_step(
        [
            (prompt, prompt.computed_tokens, 100),
            (near, near.computed_tokens, 1),
            (far, far.computed_tokens, 1),
        ],
        1.0,
        MODEL,
    )
    assert prompt.gpu_us > far.gpu_us > near.gpu_us > 0
    assert prompt.gpu_us + far.gpu_us + near.gpu_us == 1_000_000


def test_recomputation_is_kept_apart() -> None:
    again = sequence("again", computed=10, ever=40)
    share_step([(again, again.computed_tokens, 60)], 0.006, MODEL)
    assert (again.gpu_us, again.recomputed_gpu_us) == (3_000, 3_000)


def test_nobody_else_pays_for_a_result_that_came_too_late() -> None:
    decode, prompt = sequence("decode", computed=100), sequence("prompt")
    share_step([(decode, 100, 1), (prompt, 0, 100)], 0.01, MODEL, {prompt})
    assert decode.gpu_us + prompt.recomputed_gpu_us == 10_000
    assert (decode.gpu_us < 1_000, prompt.gpu_us, decode.recomputed_gpu_us) == (True, 0, 0)


def lives_of(replica: VirtualReplica, steps: int) -> tuple[float, dict[str, int]]:
    """Runs to the end; the time of all steps, and what each outcome says."""
    busy_s, told = 0.0, {}
    for _ in range(steps):
        if not replica.core.has_work():
            break
        result = replica.step()
        busy_s += result.duration_s
        for delta in (delta for deltas in result.deltas.values() for delta in deltas):
            if delta.outcome is not None:
                told[delta.sequence_id] = delta.outcome.gpu_us + delta.outcome.recomputed_gpu_us
    return busy_s, told


@pytest.mark.parametrize("sizes", [{}, {"graph_sizes": (5, 8), "mixed_sizes": (128,)}])
def test_what_the_outcomes_say_is_the_time_of_all_steps(sizes: dict[str, tuple[int, ...]]) -> None:
    """The rows of a padded step share what its padding takes."""
    step_time = msgspec.structs.replace(MODEL, **sizes)
    replica = VirtualReplica(EngineConfig(max_sequences=8), num_blocks=12, step_time=step_time)
    for number in range(6):
        replica.submit(Submit(f"s{number}", "r", f"t{number % 2}", [1 + number] * 30, 40, 40))
    busy_s, told = lives_of(replica, 2_000)
    assert len(told) == 6
    assert replica.core.table.preemptions > 0, "memory was never short: nothing was recomputed"
    # Half a microsecond a step is lost to rounding, no more.
    assert abs(sum(told.values()) - busy_s * 1e6) <= replica.core.snapshot("e").step


def test_a_lease_of_device_time_is_passed_by_one_step_at_most() -> None:
    replica = VirtualReplica(EngineConfig(max_batched_tokens=16, max_sequences=8), step_time=MODEL)
    replica.submit(Submit("s", "r", "t", [1] * 100, 50, 50, lease_gpu_us=4_000))
    deltas: list[Delta] = []
    longest_us = 0
    while replica.core.has_work():
        result = replica.step()
        longest_us = max(longest_us, round(result.duration_s * 1e6))
        deltas += [delta for each in result.deltas.values() for delta in each]
    # In the middle of its prompt a delta with nothing else in it reports that.
    assert [delta.token_ids for delta in deltas] == [[]]
    assert 4_000 <= deltas[0].gpu_us < 4_000 + longest_us
    assert replica.core.running()[0].state == "paused"
    replica.core.top_up("s", 50, 1_000_000)
    while replica.core.has_work():
        deltas += [delta for each in replica.step().deltas.values() for delta in each]
    assert deltas[-1].outcome is not None
    assert deltas[-1].outcome.finish == "length"
