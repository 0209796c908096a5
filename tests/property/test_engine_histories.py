"""Random histories of arrivals, cancels, top-ups, moves and policy changes keep the engine's invariants.

The virtual runner draws each token from what it finds in the KV slots, so that a lost, shared or stale
block shows as a wrong token. Counters at the end make sure that the interesting things really happened.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from engine.core.core import EngineConfig, StepResult
from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.messages import Delta, SamplingParams, Submit
from engine.scheduling.counters import scaled
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import POLICIES
from engine.sequence import SequenceStatus
from engine.virtual.replica import VirtualReplica

pytestmark = pytest.mark.long

NUM_BLOCKS = 24
BLOCK_TOKENS = 4
SEEDS = range(25)
MOST_STEPS = 20_000
CUT_SHORT = ("cancelled", "failed", "budget")


@dataclass
class History:
    """One random run, and what was seen."""

    seed: int
    policy: str
    policies: tuple[str, ...] = tuple(sorted(POLICIES))
    """Those that it changes to."""
    rng: random.Random = field(init=False)
    replica: VirtualReplica = field(init=False)
    submits: dict[str, Submit] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    finishes: dict[str, str] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    """Tokens of an end that was written because a budget ended."""
    interrupted: set[str] = field(default_factory=set)
    """Those that were preempted, or moved."""
    met: Counter[str] = field(default_factory=Counter)
    service: Counter[str] = field(default_factory=Counter)
    """Tokens each tenant got, step by step."""
    accounted: Counter[str] = field(default_factory=Counter)
    """Tokens each tenant got, by the outcomes."""
    charges: Counter[str] = field(default_factory=Counter)
    """What that costs, per weight."""
    cost: int = 0
    """What it costs, of all tenants."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.config = EngineConfig(
            policy=self.policy,
            max_batched_tokens=self.rng.choice((6, 11, 40)),
            max_sequences=self.rng.choice((3, 6)),
            policy_options=PolicyOptions(max_displacements=2, paused_keep_s=0.05),
        )
        self.replica = VirtualReplica(
            self.config,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            num_host_blocks=self.rng.choice((0, 12)),
            audit=True,
        )

    def run(self) -> None:
        """150 rounds of disturbances, then everything that is left is let finish."""
        for _ in range(150):
            self.disturb()
            self.step()
        for _ in range(MOST_STEPS):
            if not (self.replica.core.running() or self.replica.core.has_work()):
                return
            for live in self.replica.core.running():
                self.top_up(live.sequence_id, 10_000)
            self.step()
        raise AssertionError("the engine does not come to an end")

    def disturb(self) -> None:
        core = self.replica.core
        live = [each.sequence_id for each in core.running()]
        if len(live) < 12 and self.rng.random() < 0.5:
            self.submit()
        if live and self.rng.random() < 0.03:
            live.remove(name := self.rng.choice(live))
            core.cancel(name, "cancelled")
            self.met["cancel"] += 1
        if live and self.rng.random() < 0.6:
            name = self.rng.choice(live)
            self.top_up(name, self.leases[name] + self.rng.randint(1, 12))
        if live and self.rng.random() < 0.05:
            self.move(self.rng.choice(live))
        if self.rng.random() < 0.02:
            self.set_policy(self.rng.choice((self.policy, *self.policies)))

    def submit(self) -> None:
        name = f"s{len(self.submits)}"
        max_tokens = self.rng.randint(1, 30)
        lease = self.rng.randint(1, max_tokens)
        submit = Submit(
            sequence_id=name,
            request_id=name,
            tenant_id=self.rng.choice("abcd"),
            prompt_token_ids=self.prompt(),
            predicted_high_tokens=self.rng.choice((0, 30)),
            deadline_in_s=self.rng.choice((None, 0.05, 1.0)),
            max_tokens=max_tokens,
            lease_tokens=lease,
            tier=self.rng.choice((0, 1, 1, 2)),
            weight=self.rng.choice((1.0, 2.0)),
            predicted_output_tokens=self.rng.randint(1, 30),
            **self.drawn_fields(),
        )
        self.submits[name] = submit
        self.lengths[name] = self.rng.randint(1, 40)
        self.tokens[name], self.text[name], self.leases[name] = [], "", lease
        assert self.replica.submit(submit, output_tokens=self.lengths[name]) is None

    def set_policy(self, name: str) -> None:
        self.replica.core.set_policy(name)

    def drawn_fields(self) -> dict[str, Any]:
        """Further fields of a `Submit`."""
        return {}

    def prompt(self) -> list[int]:
        """Often one that begins like an earlier one."""
        length = self.rng.randint(1, 40)
        start = [1 + self.rng.randrange(3)] * self.rng.choice((0, 0, 8, 17, 24))
        return (start + [self.rng.randrange(1, 1000) for _ in range(40)])[:length]

    def top_up(self, name: str, lease: int) -> None:
        self.leases[name] = max(self.leases[name], lease)
        self.replica.core.top_up(name, lease)

    def move(self, name: str) -> None:
        """Out and in again, with its KV or without."""
        self.interrupted.add(name)
        state = self.replica.core.export(name)
        assert state is not None
        self.replica.core.check()
        if state.kv and self.rng.random() < 0.5:
            self.met["moved with kv"] += 1
        else:
            state = replace(state, kv=[])
            self.met["moved without kv"] += 1
        assert self.replica.core.import_(state) is None

    def step(self) -> None:
        core, table = self.replica.core, self.replica.core.table
        had_work = core.has_work()
        result = core.step()
        core.check()
        assert result.num_tokens <= self.config.max_batched_tokens
        assert result.num_sequences <= self.config.max_sequences
        if result.wait_until_s is None:
            assert self.did_work(result) == had_work, "work conservation"
        elif not result.num_tokens:
            self.met["waited on purpose"] += 1
            self.replica.clock.advance(max(0.0, result.wait_until_s - self.replica.clock.now_s))
        deltas = [delta for each in result.deltas.values() for delta in each]
        assert len({delta.sequence_id for delta in deltas}) == len(deltas)
        for delta in deltas:
            self.take(delta)
        for tenant, had in result.service.items():
            self.service[tenant] += had.computed_tokens + had.emitted_tokens
        self.met["preempted"] += result.num_preempted
        self.met["paused"] += sum(each.state is SequenceStatus.PAUSED for each in table.sequences.values())
        self.met["displaced"] += sum(
            each.state is SequenceStatus.PAUSED and each.may_emit for each in table.sequences.values()
        )
        assert all(each.times_displaced <= 2 for each in table.sequences.values())
        self.met["mixed"] += 0 < result.num_sequences < result.num_tokens
        self.met["resting"] += sum(
            each.state is SequenceStatus.PREEMPTED for each in table.sequences.values()
        )

    def did_work(self, result: StepResult) -> bool:
        return bool(result.num_tokens or result.deltas)

    def take(self, delta: Delta) -> None:
        name = delta.sequence_id
        assert name not in self.finishes, "something came after the outcome"
        assert delta.first_index == len(self.tokens[name]), "token k is sent once, in order"
        self.tokens[name] += delta.token_ids
        self.text[name] += delta.text
        assert len(self.tokens[name]) <= self.leases[name], "a token without a lease"
        if delta.outcome is not None:
            assert delta.outcome.emitted_tokens == len(self.tokens[name])
            self.finishes[name] = delta.outcome.finish
            self.accounted[self.submits[name].tenant_id] += (
                delta.outcome.computed_tokens + delta.outcome.emitted_tokens
            )
            cost = (
                INPUT_TOKEN_COST * delta.outcome.computed_tokens
                + OUTPUT_TOKEN_COST * delta.outcome.emitted_tokens
            )
            self.cost += cost
            self.charges[self.submits[name].tenant_id] += scaled(cost, self.submits[name].weight)
            self.met[delta.outcome.finish] += 1
            if delta.outcome.preemptions:
                self.interrupted.add(name)
            self.met["recomputed"] += delta.outcome.recomputed_tokens
            self.met["cached"] += delta.outcome.cached_tokens
            if delta.outcome.finish not in CUT_SHORT:
                had = delta.outcome.computed_tokens + delta.outcome.cached_tokens
                assert had == len(self.submits[name].prompt_token_ids)

    def check_end(self) -> None:
        """Once all have ended: each token was served and charged once, recomputed or not."""
        core = self.replica.core
        assert self.finishes.keys() == self.submits.keys(), "every sequence finishes"
        assert core.table.pool.num_referenced == 0, "a block is held at the end"
        assert core.table.pool.num_free == NUM_BLOCKS
        assert self.service == self.accounted
        totals = core.snapshot("e").service
        served = {tenant: had.computed_tokens + had.emitted_tokens for tenant, had in totals.items()}
        assert Counter(served) == self.accounted
        had = {tenant: core.table.standings.service(tenant) for tenant in "abcd"}
        assert Counter(had) == self.charges
        assert core.counters.served_cost == self.cost

    def new_replica(self) -> VirtualReplica:
        return VirtualReplica(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, audit=True)

    def sampling_alone(self, submit: Submit) -> SamplingParams:
        return submit.sampling

    def alone(self, name: str) -> tuple[list[int], str, str]:
        """The same request on an engine of its own, in the plain order: its tokens, text and finish."""
        replica = self.new_replica()
        submit = self.submits[name]
        whole = Submit(
            sequence_id=name,
            request_id=name,
            tenant_id="x",
            prompt_token_ids=submit.prompt_token_ids,
            max_tokens=submit.max_tokens,
            lease_tokens=submit.max_tokens,
            sampling=self.sampling_alone(submit),
            grammar=submit.grammar,
        )
        assert replica.submit(whole, output_tokens=self.lengths[name]) is None
        tokens: list[int] = []
        text = finish = ""
        while replica.core.has_work():
            for delta in replica.step().deltas["virtual"]:
                tokens += delta.token_ids
                text += delta.text
                finish = delta.outcome.finish if delta.outcome is not None else ""
        return tokens, text, finish


def check_answers(history: History) -> None:
    """Each is what it would have been alone, up to where it was cancelled or failed."""
    for name, finish in history.finishes.items():
        tokens, text, alone = history.alone(name)
        emitted = len(history.tokens[name]) - history.written.get(name, 0)
        assert history.tokens[name][:emitted] == tokens[:emitted], f"{name} of history {history.seed}"
        if finish not in CUT_SHORT:
            assert (history.tokens[name], history.text[name], finish) == (tokens, text, alone)


def run_histories(
    policy: str, seeds: Iterable[int], kind: Callable[[int, str], History] = History
) -> Counter[str]:
    """What was met in them."""
    met: Counter[str] = Counter()
    for seed in seeds:
        history = kind(seed, policy)
        history.run()
        history.check_end()
        table = history.replica.core.table
        check_answers(history)
        counts = table.pool.counts
        history.met["adopted"] = counts.adopted_tokens
        history.met["deferred"] = counts.deferrals
        history.met["evicted"] = counts.evicted_blocks
        history.met["swapped"] = table.swaps
        history.met["suspended"] = sum(each.kind == "suspend" for each in table.decisions.last())
        met.update(history.met)
    return met


@pytest.mark.parametrize("policy", ["fcfs", "vtc", "hybrid"])
def test_random_histories(policy: str) -> None:
    met = run_histories(policy, SEEDS)
    assert met["preempted"] > 100
    assert met["recomputed"] > 500
    assert met["paused"] > 500
    assert met["displaced"] > 20
    assert met["resting"] > 50
    assert met["cancel"] > 25
    assert met["mixed"] > 250
    assert met["moved with kv"] > 10
    assert met["moved without kv"] > 10
    assert met["cached"] > 500
    assert met["evicted"] > 100
    if policy != "fcfs":
        assert met["swapped"] > 10


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_random_histories_of_every_policy(policy: str) -> None:
    met = run_histories(policy, range(100, 106))
    assert met["preempted"] > 10
    assert met["cached"] > 50


def test_waiting_on_purpose_displacing_and_suspending_were_all_met() -> None:
    """The choices that only some policies have did act in histories like those above."""
    assert run_histories("dynamic", range(3))["waited on purpose"] > 0
    assert run_histories("srpt", range(6))["displaced"] > 0
