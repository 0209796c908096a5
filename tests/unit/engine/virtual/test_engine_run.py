"""A load of requests on one virtual engine."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.policy import Policy, make_policy
from engine.sequence import Sequence
from ops.bench.estimates.control import A10G_LLAMA_2_7B
from ops.simulate.machines.machines import profile_machine
from ops.simulate.traffic.requests import SimulatedRequest
from tests.support.builders import step_time
from tests.support.drawn_arrivals import fixed, stream
from tests.support.engine_run import run_load
from tests.support.policy_traffic import arena_lengths, at_load

SECOND_A_STEP = step_time(1.0)
SMALL = profile_machine(
    "a second a step", SECOND_A_STEP, kv_tokens=1024, max_sequences=2, max_batched_tokens=64,
    context_tokens=512,
)  # fmt: skip


def two_seconds_apart() -> list[SimulatedRequest]:
    return stream([0.5, 2.25, 2.5, 2.75], "one", fixed(16, 3), random.Random(1))


def test_times_count_from_the_arrival_and_not_from_the_step_that_saw_it() -> None:
    run = run_load("fcfs", two_seconds_apart(), SMALL)
    # Two places, steps of a second: the first runs 0.5 to 3.5; the second comes at 2.25, into the step
    # that begins at 2.5; the other two wait for places.
    assert run.served[0].ttft_s == pytest.approx(1.0)
    assert run.served[0].e2e_s == pytest.approx(3.0)
    assert run.served[1].ttft_s == pytest.approx(3.5 - 2.25)
    assert run.served[2].ttft_s == pytest.approx(4.5 - 2.5)
    assert all(each.done and each.emitted_tokens == 3 for each in run.served)
    assert run.total_tokens == 4 * 19


def test_a_run_is_the_same_every_time() -> None:
    def figures() -> list[tuple[float, float]]:
        arrivals = at_load(arena_lengths(1)[:80], 0.9, A10G_LLAMA_2_7B)
        run = run_load("vtc", arrivals, A10G_LLAMA_2_7B)
        return [(each.ttft_s, each.e2e_s) for each in run.served]

    assert figures() == figures()


def test_a_request_that_can_never_run_ends_the_run() -> None:
    with pytest.raises(ValueError, match=r"request 0 .* was refused"):
        run_load("fcfs", [SimulatedRequest(0.0, "one", 600, 5)], SMALL)


class NeverAdmits(PredictedReserve):
    """Never admits: no admission may do that."""

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        return Defer("never", None)


def test_an_engine_that_hangs_is_found_out() -> None:
    def hangs() -> Policy:
        return replace(make_policy("fcfs"), admit=NeverAdmits())

    with pytest.raises(RuntimeError, match="the engine hangs at"):
        run_load(hangs, [SimulatedRequest(0.0, "one", 5, 5)], SMALL)


def test_a_run_that_is_cut_off_counts_only_what_was_answered() -> None:
    run = run_load("fcfs", two_seconds_apart(), SMALL, until_s=4.0)
    assert [each.done for each in run.served] == [True, False, False, False]
    assert run.served[3].ttft_s == math.inf
    assert run.total_tokens == 19
