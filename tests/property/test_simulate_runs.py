"""Runs of steps give what the same steps give one by one.

Three ways through the same requests: a pool that takes runs, its twin that does not, and for one replica the
core of a real engine on a virtual clock. They must agree on every instant to the last bit, on who was served
in which order, and on all counters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.core import EngineConfig
from engine.messages import SamplingParams, StepTime, Submit
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import POLICIES
from engine.virtual.fast_replica import SimulatedReplica
from engine.virtual.replica import VirtualReplica
from engine.virtual.step_shapes import LinearTiming, make_shapes
from ops.simulate.machines.machines import Machine, roofline_machine
from ops.simulate.pool import Member, SimulatedPool, busy
from ops.simulate.predictions import PREDICTIONS
from ops.simulate.traffic.requests import SimulatedRequest

pytestmark = pytest.mark.long

STEP_TIME = StepTime(5e-3, 50e-6, 30e-9, 100e-6, samples=1000, relative_error=0.0)
EXAMPLES = 16


def machine(blocks: int, places: int) -> Machine:
    """A small one, so that places and memory are scarce."""
    return Machine(
        "small", LinearTiming(STEP_TIME), STEP_TIME, blocks * 4, 256, places, max(places, 24), block_tokens=4
    )


def requests(seed: int, *, count: int = 40, gap_s: float = 0.05, tiers: int = 1) -> list[SimulatedRequest]:
    """Short and long, in clumps and apart, some of them with beginnings in common."""
    rng = random.Random(seed)
    at_s = 0.0
    found = []
    for _ in range(count):
        at_s += rng.choice([0.0, rng.expovariate(1 / gap_s), 5 * gap_s * rng.random()])
        input_tokens = rng.choice([1, 3, 9, 20, 40])
        tenant = rng.randrange(3)
        found.append(
            SimulatedRequest(
                at_s,
                f"tenant-{tenant}",
                input_tokens,
                rng.choice([1, 2, 5, 30, 60]),
                (tenant,) if rng.random() < 0.5 else (),
                rng.randrange(tiers) + 1,
                1.0 + tenant,
            )
        )
    return found


def outcome(pool: SimulatedPool) -> dict[str, Any]:
    """All that must agree."""
    records = pool.records
    work = busy(pool)
    return {
        "records": {
            name: list(getattr(records, name))
            for name in (
                "dispatched_s",
                "first_s",
                "last_s",
                "cached_tokens",
                "preemptions",
                "recomputed_tokens",
                "refused",
            )
        },
        "counters": pool.flow.counters.values(),
        "engines": [
            (
                member.engine.table.counters.values(),
                member.engine.table.counters.served_cost,
                member.engine.table.standings.values(),
                member.engine.table.decisions.step,
                member.engine.table.pool.counts,
                member.engine.table.pool.num_blank,
                member.engine.shapes.padded_tokens,
                [(each.kind, each.sequence_id) for each in member.engine.table.decisions.last()],
            )
            for member in pool.members
        ],
        "steps": work.steps,
        "tokens": work.computed_tokens,
        "now_s": pool.now_s,
        "service": pool.service_by_now(),
    }


def run(
    policy: str, found: list[SimulatedRequest], size: Machine, *, runs: bool, **asked: Any
) -> SimulatedPool:
    predictions = asked.pop("predictions", "learned")
    pool = SimulatedPool(policy, size, runs=runs, predictions=PREDICTIONS[predictions](), **asked)
    pool.run(found)
    for member in pool.members:
        member.engine.table.check()
    return pool


class AskingPool(SimulatedPool):
    """Tells the gateway the output of every running sequence, after all replicas told what tenants had."""

    def _settle_emitted(self, member: Member, cause: Member | None) -> None:
        for asked in self.members if member is self.members[-1] else ():
            ahead = self._ahead(asked, cause)
            for sequence in asked.engine.table.running:
                emitted = len(sequence.token_ids) - sequence.prompt_tokens - ahead
                if emitted > 0:
                    self.flow.progress(sequence.submit.sequence_id, emitted, 1)


@pytest.mark.parametrize("policy", ["vtc", "hybrid"])
@pytest.mark.parametrize("predictions", ["learned", "exact", "none"])
def test_a_gateway_that_hears_only_of_output_beyond_its_prediction_decides_the_same(
    policy: str, predictions: str
) -> None:
    for blocks, places, gap_s, seed in ((60, 6, 0.02, 0), (200, 12, 0.005, 0), (200, 12, 0.005, 1)):
        size = machine(blocks, places)
        rng = random.Random(seed)
        came = [
            replace(
                request,
                tenant=f"tenant-{rng.randrange(12)}",
                weight=1.0,
                input_tokens=rng.choice([5, 20, 80]),
            )
            for request in requests(seed, count=200, gap_s=gap_s)
        ]
        outcomes = []
        for make in (SimulatedPool, AskingPool):
            pool = make(policy, size, replicas=3, predictions=PREDICTIONS[predictions]())
            pool.run(came)
            outcomes.append(outcome(pool))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_runs_and_single_steps_agree_under_every_policy(policy: str) -> None:
    in_runs = preempted = 0

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(
        seed=st.integers(0, 10**6),
        replicas=st.integers(1, 3),
        blocks=st.sampled_from([26, 30, 40, 200]),
        places=st.sampled_from([2, 6, 16]),
        gap_s=st.sampled_from([0.01, 0.1, 0.5]),
        tiers=st.sampled_from([1, 2]),
        caches=st.booleans(),
        predictions=st.sampled_from(["learned", "exact", "none"]),
    )
    def agree(
        seed: int,
        replicas: int,
        blocks: int,
        places: int,
        gap_s: float,
        tiers: int,
        caches: bool,
        predictions: str,
    ) -> None:
        nonlocal in_runs, preempted
        found = requests(seed, gap_s=gap_s, tiers=tiers)
        size = machine(blocks, places)
        asked = {"replicas": replicas, "prefix_caching": caches, "predictions": predictions}
        fast = run(policy, found, size, runs=True, **asked)
        plain = run(policy, found, size, runs=False, **asked)
        assert outcome(fast) == outcome(plain)
        work, plain_work = busy(fast), busy(plain)
        assert plain_work.steps_in_runs == 0
        assert work.busy_s == pytest.approx(plain_work.busy_s)
        assert work.most_kv_use <= plain_work.most_kv_use + 1e-9
        in_runs += work.steps_in_runs
        preempted += work.preemptions

    agree()
    assert in_runs > 200, "hardly any step was taken in a run"
    if policy in ("fcfs", "vtc", "hybrid", "priority"):
        assert preempted > 5, "memory was never scarce"


@pytest.mark.parametrize("admit", ["peak", "prompt-only", "predicted-reserve", "dynamic", "buckets"])
def test_runs_and_single_steps_agree_with_other_choices_of_admission(admit: str) -> None:
    options = PolicyOptions(admit=admit)
    in_runs = 0
    for seed in range(4):
        found = requests(seed, gap_s=0.02)
        for policy in ("fcfs", "hybrid"):
            both = [
                run(policy, found, machine(60, 6), runs=runs, options=options, predictions="none")
                for runs in (True, False)
            ]
            assert outcome(both[0]) == outcome(both[1])
            in_runs += busy(both[0]).steps_in_runs
    assert in_runs > 50


def test_padded_steps_and_a_roofline_agree_as_well() -> None:
    found = requests(5, count=60, gap_s=0.02)
    sizes = {"max_sequences": 8, "max_batched_tokens": 64, "kv_tokens": 600, "block_tokens": 4}
    size = roofline_machine("l40s", "8b", **sizes)
    for policy in ("static-padded", "buckets", "fcfs"):
        size = replace(size, padded=policy != "static-padded")
        both = [run(policy, found, size, runs=runs, replicas=2) for runs in (True, False)]
        assert outcome(both[0]) == outcome(both[1])
        assert busy(both[0]).steps_in_runs > 50
        assert busy(both[0]).padded_tokens > 0 or policy != "static-padded"


@dataclass
class Known:
    """A step-time model that was learned long ago, in place of the core's own."""

    step_time: StepTime

    def observe(self, *observed: object) -> None:
        """Nothing is new."""

    def to_message(self) -> StepTime:
        """As known."""
        return self.step_time

    mean = to_message


def submit_of(number: int, request: SimulatedRequest) -> Submit:
    return Submit(
        sequence_id=str(number),
        request_id=str(number),
        tenant_id=request.tenant,
        prompt_token_ids=[number % 7] * request.input_tokens,
        max_tokens=100,
        lease_tokens=100,
        sampling=SamplingParams(seed=number),
        tier=request.tier,
        weight=request.weight,
        predicted_output_tokens=20,
    )


@pytest.mark.parametrize(
    ("policy", "step_time"),
    [
        *((policy, STEP_TIME) for policy in ("fcfs", "vtc", "hybrid", "srpt", "static", "priority")),
        ("hybrid", StepTime(1e-3, 50e-6, 30e-9, 1e-3, samples=1000, relative_error=0.0)),
        ("hybrid", StepTime(1e-3, 50e-6, 30e-9, 1e-3, 1000, 0.0, (3, 5, 10, 12), (8, 16, 24))),
    ],
)
def test_a_simulated_replica_does_what_the_core_of_an_engine_does(policy: str, step_time: StepTime) -> None:
    preempted = in_runs = 0
    slots = set()
    # Of eight places or fewer all have slots, and full steps are learned from for a while.
    places, count, blocks, gap_s = (6, 40, 48, 0.04) if step_time is STEP_TIME else (12, 400, 96, 0.01)
    for seed in range(6):
        found = requests(seed, count=count, gap_s=gap_s, tiers=2)
        config = EngineConfig(policy=policy, max_batched_tokens=24, max_sequences=places)
        sizes = {"num_blocks": blocks, "block_tokens": 4, "context_tokens": 256, "step_time": step_time}
        real = VirtualReplica(config, **sizes)  # type: ignore[arg-type]
        real.core.step_time = Known(step_time)  # type: ignore[assignment]
        real.core.table.step_time = step_time
        simulated = SimulatedReplica(config, LinearTiming(step_time), make_shapes(), **sizes)  # type: ignore[arg-type]
        expected = core_history(real, found)
        assert simulated_history(simulated, found) == expected
        assert simulated.table.counters.values() == real.core.counters.values()
        assert simulated.table.standings.values() == real.core.table.standings.values()
        preempted += real.core.table.preemptions
        in_runs += simulated.work.steps_in_runs
        slots.add(simulated.table.most_decodes)
    assert in_runs > 50
    assert slots == {places} or step_time is not STEP_TIME
    assert min(slots) < places or step_time is STEP_TIME, "slots were never fewer than places"
    if policy != "static":
        assert preempted > 0


History = list[tuple[str, str, float]]


def core_history(replica: VirtualReplica, found: list[SimulatedRequest]) -> History:
    """First and last tokens, in order."""
    history: History = []
    begun: set[str] = set()
    number = 0
    while number < len(found) or replica.core.has_work():
        if not replica.core.has_work():
            replica.clock.advance(max(0.0, found[number].arrival_s - replica.clock.now_s))
        while number < len(found) and found[number].arrival_s <= replica.clock.now_s:
            replica.submit(submit_of(number, found[number]), output_tokens=found[number].output_tokens)
            number += 1
        for delta in replica.step().deltas.get("virtual", ()):
            if delta.token_ids and delta.sequence_id not in begun:
                begun.add(delta.sequence_id)
                history.append(("first", delta.sequence_id, replica.clock.now_s))
            if delta.outcome is not None:
                history.append(("last", delta.sequence_id, replica.clock.now_s))
    return sorted(history, key=lambda each: (each[2], each[0]))


def simulated_history(replica: SimulatedReplica, found: list[SimulatedRequest]) -> History:
    """The same, with runs, which arrivals cut short."""
    history: History = []
    number = 0
    while number < len(found) or replica.has_work:
        if not replica.has_work:
            replica.now_s = max(replica.now_s, found[number].arrival_s)
        while number < len(found) and found[number].arrival_s <= replica.now_s:
            replica.submit(submit_of(number, found[number]), found[number].output_tokens)
            number += 1
        steps = replica.steps_alike()
        if steps:
            replica.begin_run(steps)
            if number < len(found):
                steps = min(steps, replica.steps_begun(found[number].arrival_s, at_now=False))
            replica.end_run(steps)
            continue
        happened = replica.step()
        history += [("first", each.sequence_id, replica.now_s) for each in happened.first]
        history += [("last", each.sequence_id, replica.now_s) for each in happened.finished]
    return sorted(history, key=lambda each: (each[2], each[0]))
