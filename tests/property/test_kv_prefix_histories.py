"""With shared prefixes, swapping and cancels, every answer is as if alone, and every prompt token is computed
once or found in the cache.

The virtual runner draws each token from what it finds in the KV slots, so that a block which was shared by
mistake, published too early, lost or restored wrongly shows as a wrong token. Counters at the end make sure
that the prefix cache and host memory really had a part in it.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.core.core import EngineConfig
from engine.messages import SequenceOutcome, Submit
from engine.scheduling.options import PolicyOptions
from engine.virtual.replica import VirtualReplica

BLOCK_TOKENS = 4
SEEDS = range(30)


class History:
    """One random run."""

    def __init__(self, seed: int, policy: str) -> None:
        self.random = random.Random(seed)
        self.num_blocks = self.random.choice((16, 30, 60))
        self.replica = VirtualReplica(
            EngineConfig(
                policy=policy,
                max_batched_tokens=self.random.choice((6, 17, 60)),
                max_sequences=self.random.choice((3, 6)),
                policy_options=PolicyOptions(max_displacements=2, paused_keep_s=0.05),
            ),
            num_blocks=self.num_blocks,
            block_tokens=BLOCK_TOKENS,
            num_host_blocks=self.random.choice((0, 10, 60)),
            swap_block_s=self.random.choice((0.0, 1e-6, 1.0)),
            audit=True,
        )
        self.submits: dict[str, Submit] = {}
        self.lengths: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.outcomes: dict[str, SequenceOutcome] = {}
        self.stems = [[self.random.randrange(1, 1000) for _ in range(40)] for _ in range(3)]

    def run(self) -> None:
        """Arrivals, cancels and top-ups, then everybody who is left is let finish."""
        core = self.replica.core
        for _ in range(80):
            live = [each.sequence_id for each in core.running()]
            for _ in range(self.random.choice((0, 0, 1, 3))):
                if len(live) < 14:
                    self.submit()
            if live and self.random.random() < 0.05:
                core.cancel(live.pop(self.random.randrange(len(live))))
            if live and self.random.random() < 0.5:
                name = self.random.choice(live)
                core.top_up(name, core.table.sequences[name].lease_tokens + self.random.randint(1, 12))
            self.step()
        for _ in range(5000):
            if not core.running() and not core.has_work():
                return
            for each in core.running():
                core.top_up(each.sequence_id, 10_000)
            self.step()
        raise AssertionError("not everybody finishes")

    def submit(self) -> None:
        name = f"s{len(self.submits)}"
        stem = self.random.choice(self.stems)
        prompt = stem[: self.random.randint(1, 36)]
        if self.random.random() < 0.5:
            prompt = prompt + [self.random.randrange(1, 1000) for _ in range(self.random.randint(1, 6))]
        max_tokens = self.random.randint(1, 20)
        self.submits[name] = Submit(
            sequence_id=name,
            request_id=name,
            tenant_id=self.random.choice("aab"),
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            lease_tokens=self.random.randint(1, max_tokens),
            tier=self.random.choice((0, 1, 1, 2)),
            predicted_output_tokens=self.random.randint(1, 20),
        )
        self.lengths[name] = self.random.randint(1, 25)
        self.tokens[name] = []
        assert self.replica.submit(self.submits[name], output_tokens=self.lengths[name]) is None

    def step(self) -> None:
        result = self.replica.step()
        self.replica.core.check()
        for delta in result.deltas.get("virtual", []):
            self.tokens[delta.sequence_id] += delta.token_ids
            if delta.outcome is not None:
                self.outcomes[delta.sequence_id] = delta.outcome

    def alone(self, name: str) -> list[int]:
        """The same request on an engine of its own, without a prefix cache."""
        replica = VirtualReplica(
            EngineConfig(prefix_caching=False), num_blocks=60, block_tokens=BLOCK_TOKENS, audit=True
        )
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
        while replica.core.has_work():
            for delta in replica.step().deltas.get("virtual", []):
                tokens += delta.token_ids
        return tokens


@pytest.mark.parametrize("policy", ["fcfs", "hybrid"])
def test_answers_do_not_depend_on_what_was_cached_shared_or_swapped(policy: str) -> None:
    met: Counter[str] = Counter()
    for seed in SEEDS:
        history = History(seed, policy)
        history.run()
        pool = history.replica.core.table.pool
        assert history.outcomes.keys() == history.submits.keys()
        assert (pool.num_free, pool.num_host_free) == (pool.num_blocks, pool.num_host_blocks)
        for name, outcome in history.outcomes.items():
            alone = history.alone(name)
            if outcome.finish == "cancelled":
                assert history.tokens[name] == alone[: len(history.tokens[name])], (seed, name)
                continue
            assert history.tokens[name] == alone, (seed, name)
            assert outcome.cached_tokens + outcome.computed_tokens == outcome.prompt_tokens, (seed, name)
            assert outcome.cached_tokens < outcome.prompt_tokens, "the last token has to be computed"
            met["hit"] += bool(outcome.cached_tokens)
            met["preempted"] += bool(outcome.preemptions)
        counts = pool.counts
        met["adopted"] += counts.adopted_tokens
        met["deferred"] += counts.deferrals
        met["revived"] += counts.revived_blocks
        met["duplicate"] += counts.duplicate_blocks
        met["evicted"] += counts.evicted_blocks
        met["swapped"] += counts.swapped_in_blocks
    for name in ("hit", "preempted", "adopted", "deferred", "revived", "duplicate", "evicted", "swapped"):
        assert met[name] >= 10, (name, met)


def _cached_tokens(replica: VirtualReplica, name: str, tenant_id: str, salt: str = "") -> int:
    """Of one prompt, the same each time, run to its end."""
    submit = Submit(
        sequence_id=name,
        request_id=name,
        tenant_id=tenant_id,
        prompt_token_ids=list(range(1, 3 * BLOCK_TOKENS + 1)),
        max_tokens=2,
        lease_tokens=2,
        prefix_salt=salt,
    )
    assert replica.submit(submit) is None
    outcome = None
    while outcome is None:
        for delta in replica.step().deltas.get("virtual", []):
            outcome = delta.outcome
    return outcome.cached_tokens


def test_a_tenant_finds_only_its_own_prefixes_unless_a_salt_is_shared_on_purpose() -> None:
    replica = VirtualReplica(block_tokens=BLOCK_TOKENS)
    whole_but_the_last_block = 2 * BLOCK_TOKENS
    assert _cached_tokens(replica, "1", "a") == 0
    assert _cached_tokens(replica, "2", "a") == whole_but_the_last_block
    assert _cached_tokens(replica, "3", "b") == 0
    assert _cached_tokens(replica, "4", "a", "both") == 0
    assert _cached_tokens(replica, "5", "b", "both") == whole_but_the_last_block
