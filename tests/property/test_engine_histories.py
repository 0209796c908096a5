"""Random histories of arrivals, cancels, top-ups, moves and policy changes keep the engine's invariants.

The virtual runner draws each token from what it finds in the KV slots, so that a lost, shared or stale
block shows as a wrong token. Counters at the end make sure that the interesting things really happened.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from engine.core.core import EngineConfig
from engine.messages import Delta, Submit
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import POLICIES
from engine.sequence import SequenceStatus
from engine.virtual.replica import VirtualReplica

pytestmark = pytest.mark.long

NUM_BLOCKS = 24
BLOCK_TOKENS = 4
SEEDS = range(25)


@dataclass
class History:
    """One random run, and what was seen."""

    seed: int
    policy: str
    rng: random.Random = field(init=False)
    replica: VirtualReplica = field(init=False)
    submits: dict[str, Submit] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    finishes: dict[str, str] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)
    service: Counter[str] = field(default_factory=Counter)
    """Tokens each tenant got, step by step."""
    accounted: Counter[str] = field(default_factory=Counter)
    """Tokens each tenant got, by the outcomes."""

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
        while self.replica.core.running() or self.replica.core.has_work():
            for live in self.replica.core.running():
                self.top_up(live.sequence_id, 10_000)
            self.step()

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
            core.set_policy(self.rng.choice((self.policy, *sorted(POLICIES))))

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
        )
        self.submits[name] = submit
        self.lengths[name] = self.rng.randint(1, 40)
        self.tokens[name], self.text[name], self.leases[name] = [], "", lease
        assert self.replica.submit(submit, output_tokens=self.lengths[name]) is None

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
            assert bool(result.num_tokens or result.deltas) == had_work, "work conservation"
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
            self.met["recomputed"] += delta.outcome.recomputed_tokens
            self.met["cached"] += delta.outcome.cached_tokens
            if delta.outcome.finish != "cancelled":
                had = delta.outcome.computed_tokens + delta.outcome.cached_tokens
                assert had == len(self.submits[name].prompt_token_ids)

    def alone(self, name: str) -> tuple[list[int], str]:
        """The same request on an engine of its own."""
        replica = VirtualReplica(num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS, audit=True)
        submit = self.submits[name]
        whole = Submit(
            sequence_id=name,
            request_id=name,
            tenant_id="x",
            prompt_token_ids=submit.prompt_token_ids,
            max_tokens=submit.max_tokens,
            lease_tokens=submit.max_tokens,
        )
        assert replica.submit(whole, output_tokens=self.lengths[name]) is None
        tokens: list[int] = []
        text = ""
        while replica.core.has_work():
            for delta in replica.step().deltas["virtual"]:
                tokens += delta.token_ids
                text += delta.text
        return tokens, text


def check_answers(history: History) -> None:
    """Each is what it would have been alone, up to where it was cancelled."""
    for name, finish in history.finishes.items():
        tokens, text = history.alone(name)
        emitted = len(history.tokens[name])
        assert history.tokens[name] == tokens[:emitted], f"{name} of history {history.seed}"
        if finish != "cancelled":
            assert (history.tokens[name], history.text[name]) == (tokens, text)


def run_histories(policy: str, seeds: Iterable[int]) -> Counter[str]:
    """What was met in them."""
    met: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed, policy)
        history.run()
        assert history.finishes.keys() == history.submits.keys(), "everybody finishes"
        table = history.replica.core.table
        assert table.pool.num_referenced == 0, "nobody holds a block at the end"
        assert table.pool.num_free == NUM_BLOCKS
        assert history.service == history.accounted, "each token is served once, recomputed or not"
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
