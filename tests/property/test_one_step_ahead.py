"""One step ahead of its device an engine gives the answers, and takes the charges, of the plain order.

Histories like those of `test_engine_histories.py`, with stop strings, leases of GPU time and failures beside
them, on runners that compute at once and on ones that are late. Each answer is compared with the plain order.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import pytest

from engine.core.core import EngineConfig, EngineCore, StepResult
from engine.core.plan import Plan
from engine.core.scheduler import schedule
from engine.core.sequence_table import Launch, SequenceTable
from engine.kv.cache import KvCache
from engine.messages import SamplingParams, StepTime
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import POLICIES, make_policy
from engine.sequence import Sequence
from engine.virtual.replica import VirtualClock, VirtualTexts
from tests.property.test_engine_histories import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    History,
    run_histories,
)
from tests.support.builders import submit
from tests.support.late_runner import FAILURES, LateRunner

STOPS = ((), (), ("q",), ("ab", "xyz", "c"))
MOST_GPU_US = 10**12
RUNNERS = {"at-once": {"is_late": False}, "late": {}, "copies-first": {"copies_first": True}}


class AheadHistory(History):
    """A history with `steps_ahead` 1."""

    def __init__(self, seed: int, policy: str, **runner: Any) -> None:
        self.how = runner
        super().__init__(seed, policy)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.config = EngineConfig(
            policy=self.policy,
            max_batched_tokens=self.config.max_batched_tokens,
            max_sequences=self.config.max_sequences,
            policy_options=self.config.policy_options,
            steps_ahead=1,
        )
        self.runner = LateRunner(
            self.replica.clock,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            num_host_blocks=self.replica.runner.num_host_blocks,
            **self.how,
        )
        self.replica.runner = self.runner
        self.replica.core = EngineCore(self.runner, VirtualTexts(), self.config, self.replica.clock)
        self.calls = (0, 0)
        self.beyond: dict[str, tuple[int | None, int, int]] = {}
        """Of sequences beyond their GPU time: the lease, what they had, and how often they got more."""

    def drawn_fields(self) -> dict[str, Any]:
        return {
            "sampling": SamplingParams(stop=self.rng.choice(STOPS)),
            "lease_gpu_us": self.rng.choice((None, None, self.rng.randint(1, 30_000))),
        }

    def disturb(self) -> None:
        super().disturb()
        if self.rng.random() < 0.02:
            self.replica.core.set_brakes(self.rng.choice(({}, {1: 0.5}, {1: 0.7, 2: 0.4})))
        if self.rng.random() < 0.03:
            self.runner.fail.add(self.rng.choice(FAILURES))

    def top_up(self, name: str, lease: int) -> None:
        sequence = self.replica.core.table.sequences[name]
        more_us = MOST_GPU_US if lease == 10_000 else sequence.gpu_us + self.rng.randint(1, 30_000)
        self.leases[name] = max(self.leases[name], lease)
        self.replica.core.top_up(name, lease, more_us)

    def move(self, name: str) -> None:
        super().move(name)
        self.beyond.pop(name, None)

    def did_work(self, result: StepResult) -> bool:
        return bool(result.deltas) or (self.runner.tried, self.runner.collected) != self.calls

    def step(self) -> None:
        self.calls = (self.runner.tried, self.runner.collected)
        super().step()
        core = self.replica.core
        self.met["ahead"] += core.steps_in_flight
        for name, sequence in core.table.sequences.items():
            assert sequence.emitted_tokens <= min(self.leases[name], sequence.submit.max_tokens)
            self.met["pending"] += sequence.pending_tokens
            if not sequence.is_out_of_time:
                self.beyond.pop(name, None)
                continue
            had, lease, times = sequence.gpu_us, sequence.lease_gpu_us, 0
            if name in self.beyond and self.beyond[name][0] == lease:
                times = self.beyond[name][2] + (had > self.beyond[name][1])
            assert times <= 1, "a lease of GPU time holds to two steps"
            self.beyond[name] = lease, had, times
            self.met["two steps"] += times

    def check_end(self) -> None:
        super().check_end()
        for name, finish in self.finishes.items():
            wasted = self.runner.chosen[name] - len(self.tokens[name])
            if name in self.interrupted or finish == "failed":
                continue
            assert 0 <= wasted <= (finish != "length"), f"{name} wasted {wasted} rows and ended by {finish}"
            self.met[f"wasted by {finish}"] += wasted


IN_SUITE = (("fcfs", "at-once"), ("vtc", "late"), ("vtc", "copies-first"), ("hybrid", "copies-first"))


@pytest.mark.parametrize(("policy", "runner"), IN_SUITE)
def test_each_sequence_has_the_answer_and_the_charge_of_the_plain_order(policy: str, runner: str) -> None:
    """And no lease is exceeded by a token, and one that ends wastes one row at most: none by its length."""
    met = run_histories(policy, range(3), partial(AheadHistory, **RUNNERS[runner]))
    for what in ("preempted", "recomputed", "two steps", "cached", "cancelled", "failed", "wasted by stop"):
        assert met[what] > 0, what
    assert met["ahead"] > 500
    assert met["pending"] > 500


@pytest.mark.long
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_long_histories_one_step_ahead(policy: str, runner: str) -> None:
    met = run_histories(policy, range(200, 208), partial(AheadHistory, **RUNNERS[runner]))
    assert met["wasted by stop"] > 5
    assert met["moved with kv"] > 0


def test_under_fcfs_counters_are_the_sum_of_what_was_charged() -> None:
    """Other orders lift counters."""
    history = AheadHistory(11, "fcfs")
    history.policies = ("fcfs",)
    history.run()
    history.check_end()
    assert history.met["wasted by stop"] > 0
    assert history.replica.core.counters.values() == history.charges


def on(runner: LateRunner, clock: VirtualClock, steps_ahead: int = 1) -> EngineCore:
    return EngineCore(runner, VirtualTexts(), EngineConfig(steps_ahead=steps_ahead), clock)


def test_a_block_is_given_away_only_when_the_step_that_writes_it_is_over() -> None:
    """A sequence that ends leaves a wasted row in flight; another's KV comes into its blocks at once."""
    clock = VirtualClock()
    sizes = {"num_blocks": 2, "block_tokens": 4, "copies_first": True}
    elsewhere = on(LateRunner(clock, **sizes), clock, 0)
    assert elsewhere.submit(submit("moved", max_tokens=3, prompt_token_ids=[9] * 5), "gw") is None
    elsewhere.step()
    elsewhere.step()
    state = elsewhere.export("moved")
    assert state is not None
    assert elsewhere.import_(state) is None
    kept = [delta.token_ids for _ in range(2) for delta in elsewhere.step().deltas.get("gw", [])]

    runner = LateRunner(clock, **sizes)
    core = on(runner, clock)
    runner.set_length("ends", 2)
    assert core.submit(submit("ends", max_tokens=6), "gw") is None
    ended = [core.step().deltas.get("gw", []) for _ in range(3)]
    assert [delta.outcome is not None for delta in ended[-1]] == [True]
    assert list(runner.steps[-1]) == ["ends"], "no row was wasted"
    assert core.import_(state) is None
    came = [delta.token_ids for _ in range(4) for delta in core.step().deltas.get("gw", [])]
    assert came == kept != []


# ---------------------------------------------------------------- decisions


class PlainLoop:
    """Plans a step, then notes the results of the one before; the answers are known. No device, no texts."""

    def __init__(self, core: EngineCore, answers: dict[str, list[int]]) -> None:
        config, table = core.config, core.table
        self.table = SequenceTable(
            make_policy(config.policy, config.policy_options),
            KvCache(NUM_BLOCKS, BLOCK_TOKENS, num_host_blocks=table.pool.num_host_blocks),
            ServiceCounters(),
            max_batched_tokens=config.max_batched_tokens,
            max_sequences=config.max_sequences,
        )
        self.table.mean_step_time = table.mean_step_time
        self.answers = answers
        self.steps: deque[tuple[int, Plan, Launch, list[bool]]] = deque()
        self.number = 0

    def plan(self, now_s: float, step_time: StepTime) -> dict[str, tuple[int, int]]:
        """Position and tokens by sequence."""
        table = self.table
        table.step_time = step_time
        table.raise_predictions()
        plan = schedule(table, now_s)
        if not plan.shares:
            return {}
        self.number += 1
        table.pool.fence(self.number)
        all_samples = [
            sequence.computed_tokens + tokens == sequence.total_tokens
            for sequence, tokens in plan.shares.items()
        ]
        launch = table.launched(plan.shares)
        table.settle(plan.room)
        for sequence, samples in zip(plan.shares, all_samples, strict=True):
            if samples and not sequence.may_emit:
                table.pause(sequence, now_s)
        self.steps.append((self.number, plan, launch, all_samples))
        names = [sequence.sequence_id for sequence in plan.shares]
        return dict(zip(names, zip(launch.positions, plan.shares.values(), strict=True), strict=True))

    def note_results(self) -> None:
        number, plan, launch, all_samples = self.steps.popleft()
        chosen: list[int | None] = []
        for sequence, at, samples in zip(plan.shares, launch.positions, all_samples, strict=True):
            index = at + plan.shares[sequence] - sequence.prompt_tokens
            answer = self.answers[sequence.sequence_id]
            # Past the end it is the token of a wasted row.
            chosen.append((answer[index] if index < len(answer) else 1) if samples else None)
        counts = launch.still_counts(plan.shares)
        self.table.collected(plan.shares, launch, chosen)
        for sequence, samples, does_count in zip(plan.shares, all_samples, counts, strict=True):
            answer = self.answers[sequence.sequence_id]
            if does_count and samples and sequence.known_tokens == len(answer):
                self.end(sequence)
        self.table.pool.lift_fence(number)

    def end(self, sequence: Sequence) -> None:
        self.table.drop_in_flight(sequence)
        self.table.decisions.leaves(sequence)
        self.table.finish(sequence)


class DecidedHistory(AheadHistory):
    """Runs a plain loop beside the engine; nothing moves or fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answers: dict[str, list[int]] = {}
        self.plain = PlainLoop(self.replica.core, self.answers)

    def drawn_fields(self) -> dict[str, Any]:
        return super().drawn_fields() | {"lease_gpu_us": None}

    def disturb(self) -> None:
        live = {*self.replica.core.table.sequences}
        History.disturb(self)
        for name in live - {*self.replica.core.table.sequences}:
            self.plain.end(self.plain.table.sequences[name])

    def submit(self) -> None:
        super().submit()
        name = f"s{len(self.submits) - 1}"
        self.answers[name] = self.alone(name)[0]
        self.plain.table.add(Sequence.of(self.submits[name], "virtual", self.replica.clock.now_s))

    def top_up(self, name: str, lease: int) -> None:
        super().top_up(name, lease)
        self.plain.table.top_up(self.plain.table.sequences[name], lease)

    def set_policy(self, name: str) -> None:
        super().set_policy(name)
        self.plain.table.set_policy(make_policy(name, self.config.policy_options))

    def move(self, name: str) -> None:
        pass

    def step(self) -> None:
        core, launched, collected = self.replica.core, len(self.runner.steps), self.runner.collected
        planned = self.plain.plan(self.replica.clock.now_s, core.table.step_time)
        super().step()
        for one in self.runner.steps[launched:] or [{}]:
            assert list(one.items()) == list(planned.items())
        if self.runner.collected > collected:
            self.plain.note_results()
        decided = core.table.decisions.last()
        assert decided == self.plain.table.decisions.last()
        self.met.update(decision.kind for decision in decided[len(decided) - 1 :])
        assert core.table.sequences.keys() == self.plain.table.sequences.keys()
        for name, sequence in core.table.sequences.items():
            plain = self.plain.table.sequences[name]
            assert (sequence.state, sequence.token_ids) == (plain.state, plain.token_ids), name


@pytest.mark.parametrize("policy", ["hybrid", "srpt", "dynamic"])
def test_decisions_are_those_of_a_plain_loop_that_hears_of_ends_a_step_late(policy: str) -> None:
    met = run_histories(policy, range(2), DecidedHistory)
    assert met["admit"] > 10
    assert met["pause"] + met["preempt"] + met["swap"] > 0


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_long_decisions_are_those_of_a_plain_loop_that_hears_of_ends_a_step_late(policy: str) -> None:
    run_histories(policy, range(300, 308), DecidedHistory)
