"""Are the scheduler's short ways through a common step the plain ways?

Two schedulers live through the same random history: one as it is, the other without the short way of handing
out a step of decodes, and with its books written sequence by sequence. After every step they must agree.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineConfig, EngineCore
from engine.messages import SamplingParams, Submit
from engine.planner import Planner
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.virtual import VirtualClock, VirtualRunner, VirtualTexts

POLICIES = ("hybrid", "vtc", "fcfs", "priority", "mlfq")


class PlainPlanner(Planner):
    def _hand_out_decodes(self, runners: list[Sequence]) -> bool:
        return False


class History:
    """One scheduler and the clock it is told; the same seed and calls give the same history."""

    def __init__(self, policy: str, blocks: int, seed: int) -> None:
        self._clock = VirtualClock()
        runner = VirtualRunner(self._clock, num_blocks=blocks, block_tokens=4)
        config = EngineConfig(policy=policy, max_batched_tokens=24, max_sequences=6)
        self.scheduler: Scheduler = EngineCore(runner, VirtualTexts(), config, self._clock).scheduler
        self._random = random.Random(seed)
        self._number = 0
        self.preempted = 0

    def add(self) -> None:
        draw = self._random
        length, most = draw.choice([1, 3, 9, 20]), draw.randint(1, 12)
        shared = [7] * draw.choice([0, 8])
        sequence = Sequence.of(
            Submit(
                sequence_id=f"sequence-{self._number}",
                request_id=f"sequence-{self._number}",
                tenant_id=f"tenant-{draw.randrange(3)}",
                prompt_token_ids=shared + [draw.randrange(50) for _ in range(length)],
                max_tokens=most,
                lease_tokens=most,
                sampling=SamplingParams(),
                predicted_output_tokens=draw.randint(1, 12),
                tier=draw.randrange(2),
                weight=draw.choice([1.0, 3.0]),
            ),
            "gateway",
            self._clock.now_s,
        )
        self._number += 1
        self.scheduler.add(sequence)

    def step(self, *, plainly: bool) -> tuple[Any, ...]:
        """What is to be compared: shares and service, and all that is known of every sequence."""
        scheduler = self.scheduler
        plan = scheduler.schedule(self._clock.now_s)
        self.preempted += len(plan.preempted)
        shares = dict(plan.shares)
        chosen = [
            self._random.randrange(50) if each.computed_tokens + tokens == each.total_tokens else None
            for each, tokens in shares.items()
        ]
        if plainly:
            first_times = []
            for (sequence, tokens), token_id in zip(shares.items(), chosen, strict=True):
                first_times.append(scheduler.computed(sequence, tokens))
                if token_id is not None:
                    scheduler.emitted(sequence, token_id)
        else:
            first_times = scheduler.commit(shares, chosen)
        for sequence in shares:
            if sequence.emitted_tokens >= sequence.submit.max_tokens:
                scheduler.finish(sequence)
        scheduler.check()
        self._clock.advance(0.01)
        return (
            [(each.sequence_id, tokens) for each, tokens in shares.items()],
            first_times,
            (plan.room.used_tokens, plan.room.used_context, plan.room.used_sequences, plan.room.tokens),
            scheduler.counters.values(),
            scheduler.counters.served_cost,
            [
                (each.sequence_id, each.state, list(each.block_table), each.computed_tokens,
                 each.ever_computed_tokens, each.recomputed_tokens, each.cursor.blocks)
                for each in scheduler.sequences.values()
            ],
            [each.sequence_id for each in scheduler.prefills],
        )  # fmt: skip


def live_through(policy: str, blocks: int, seed: int, arrivals: list[int]) -> tuple[int, int, int]:
    """Runs both histories and compares them. Returns how many steps took the short way, how many did not,
    and how many sequences gave way."""
    quick, plain = History(policy, blocks, seed), History(policy, blocks, seed)
    taken = {True: 0, False: 0}
    with pytest.MonkeyPatch.context() as patch:
        short_way = Planner._hand_out_decodes

        def counted(planner: Planner, runners: list[Sequence]) -> bool:
            is_short = short_way(planner, runners)
            taken[is_short] += 1
            return is_short

        for count in [*arrivals, *[0] * 40]:
            for history in (quick, plain):
                for _ in range(count):
                    history.add()
            patch.setattr(Planner, "_hand_out_decodes", counted)
            patch.setattr("engine.scheduler.Planner", Planner)
            got = quick.step(plainly=False)
            patch.setattr("engine.scheduler.Planner", PlainPlanner)
            assert got == plain.step(plainly=True)
    return taken[True], taken[False], quick.preempted


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    blocks=st.integers(12, 40),
    seed=st.integers(0, 2**16),
    arrivals=st.lists(st.integers(0, 3), min_size=5, max_size=40),
)
def test_the_short_ways_are_the_plain_ones(policy: str, blocks: int, seed: int, arrivals: list[int]) -> None:
    live_through(policy, blocks, seed, arrivals)


def test_the_histories_take_both_ways_and_run_out_of_memory() -> None:
    counts = [live_through("hybrid", 13, seed, [2, 0, 1] * 10) for seed in range(8)]
    short, plain, preempted = (sum(column) for column in zip(*counts, strict=True))
    assert short > 50
    assert plain > 50
    assert preempted > 5
