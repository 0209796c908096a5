"""Every policy and every choice runs an engine to the end without changing an answer.

Parametrised over POLICIES, ADMITS, COMPOSES and EVICTS: a new choice is held to it by being named there. The
engine is a virtual one whose tokens depend on the content of its KV cache: a block freed too early, shared by
mistake or not restored changes the answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from engine.core.core import EngineConfig
from engine.messages import Submit
from engine.scheduling.batch_or_wait.wait_table import TableAction
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import ADMITS, COMPOSES, EVICTS, LEARNED_POLICIES, POLICIES, Policy, make_policy
from engine.virtual.replica import VirtualReplica

NUM_REQUESTS = 40
MOST_STEPS = 20_000


class WaitsForFour:
    """A table that waits a little for four."""

    long_tokens = 30
    longest_wait_s = 0.1

    def decide(
        self,
        *,
        rate_per_s: float,
        num_waiting: int,
        oldest_wait_s: float,
        has_long: bool,
        remaining_tokens: int,
        kv_pressure: float,
    ) -> TableAction:
        return TableAction(0.0, num_waiting) if num_waiting >= 4 else TableAction(0.01, 0)


def cases() -> Iterator[tuple[str, PolicyOptions]]:
    for name in POLICIES | LEARNED_POLICIES:
        yield name, PolicyOptions()
    for name in ADMITS:
        yield "vtc", PolicyOptions(admit=name, batch_or_wait_table=WaitsForFour(), suspend_after_s=0.05)
    for name in COMPOSES:
        yield "fcfs", PolicyOptions(compose=name, slots=4, cap_tokens=16, ttft_target_s=0.05)
        yield "hybrid", PolicyOptions(compose=name, long_prefill_token_threshold=40, target_step_s=0.004)
    for name in EVICTS:
        yield "srpt", PolicyOptions(admit="prompt-only", evict=name)


def run(policy: Policy | None, seed: int, steps_ahead: int = 0) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how many preemptions there were; without a policy: one request at a time."""
    rng = random.Random(seed)
    replica = VirtualReplica(
        EngineConfig(max_batched_tokens=64, max_sequences=12, steps_ahead=steps_ahead),
        num_blocks=60 if policy else 600,
        block_tokens=8,
        audit=True,
    )
    if policy is not None:
        replica.core.table.set_policy(policy)
    to_come: list[tuple[float, Submit, int]] = []
    at_s = 0.0
    for number in range(NUM_REQUESTS):
        gap_s = rng.expovariate(60)
        at_s += gap_s if policy else 100.0
        submit = Submit(
            sequence_id=f"s{number}",
            request_id=f"s{number}",
            tenant_id=rng.choice("abc"),
            prompt_token_ids=[
                rng.randint(1, 500) for _ in range(rng.choice((rng.randint(1, 30), rng.randint(50, 250))))
            ],
            max_tokens=80,
            lease_tokens=80,
            tier=rng.choice((0, 1, 1, 2)),
            predicted_output_tokens=rng.randint(1, 80),
            predicted_high_tokens=80,
        )
        to_come.append((at_s, submit, rng.randint(1, 60)))
    tokens: dict[str, list[int]] = {}
    ended = 0
    for _ in range(MOST_STEPS):
        while to_come and to_come[0][0] <= replica.clock.now_s:
            _, submit, length = to_come.pop(0)
            assert replica.submit(submit, output_tokens=length) is None
        before_s = replica.clock.now_s
        result = replica.step()
        replica.core.check()
        for delta in (delta for deltas in result.deltas.values() for delta in deltas):
            tokens.setdefault(delta.sequence_id, []).extend(delta.token_ids)
            ended += delta.outcome is not None
        if ended == NUM_REQUESTS:
            return tokens, replica.core.table.preemptions
        if replica.clock.now_s == before_s and not result.deltas and not result.num_tokens:
            waits = [to_come[0][0]] if to_come else []
            if replica.core.wait_until_s is not None:
                waits.append(replica.core.wait_until_s)
            assert waits, "work is left, nothing moves and nothing is waited for"
            replica.clock.advance(max(0.0, min(waits) - before_s))
    raise AssertionError(f"{NUM_REQUESTS - ended} requests did not end in {MOST_STEPS} steps")


@cache
def alone(seed: int) -> dict[str, list[int]]:
    return run(None, seed)[0]


@pytest.mark.parametrize("steps_ahead", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("name", "options"),
    list(cases()),
    ids=lambda value: value if isinstance(value, str) else value.admit or value.compose or value.evict,
)
def test_every_request_ends_with_the_tokens_it_gets_alone(
    name: str, options: PolicyOptions, steps_ahead: int
) -> None:
    tokens, preemptions = run(make_policy(name, options), 3, steps_ahead)
    assert tokens == alone(3)
    if options.evict:
        assert preemptions > 5, "nobody was ever evicted"
