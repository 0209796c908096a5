"""The scheduler's fast paths through a common step give what the plain ones give.

Two schedulers live through the same random history: one as it is, the other without the short ways (of
handing out a step of decodes, and of admitting without a look at those who run where there is memory for all
that they can ever take). After every step they must agree.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.core import EngineConfig, EngineCore
from engine.core.scheduler import Scheduler, schedule
from engine.core.sequence_table import SequenceTable
from engine.kv.prefix import Match
from engine.messages import SamplingParams, Submit
from engine.scheduling.admit.base import Batch
from engine.scheduling.admit.reserve import PredictedReserve
from engine.sequence import Sequence
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualTexts
from tests.support.scheduling_states import make_batch, random_sequence, start

POLICIES = ("hybrid", "vtc", "fcfs", "priority", "mlfq")


class PlainScheduler(Scheduler):
    def _hand_out_decodes(self, runners: list[Sequence]) -> bool:
        return False

    def _room_to_start(self, batch: Batch, sequence: Sequence, match: Match) -> bool:
        batch.most_promised_blocks = None
        return super()._room_to_start(batch, sequence, match)


@dataclass
class Taken:
    """How often each way was taken."""

    short_steps: int = 0
    plain_steps: int = 0
    sure_admissions: int = 0
    counted_admissions: int = 0
    preempted: int = 0


class History:
    """One scheduler and the clock it is told; the same seed and calls give the same history."""

    def __init__(self, policy: str, blocks: int, seed: int) -> None:
        self._clock = VirtualClock()
        runner = VirtualRunner(self._clock, num_blocks=blocks, block_tokens=4)
        config = EngineConfig(policy=policy, max_batched_tokens=24, max_sequences=6, watermark_permille=75)
        self.table: SequenceTable = EngineCore(runner, VirtualTexts(), config, self._clock).table
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
        self.table.add(sequence)

    def step(self) -> tuple[Any, ...]:
        """What is to be compared: shares and service, and all that is known of every sequence."""
        table = self.table
        plan = schedule(table, self._clock.now_s)
        self.preempted += len(plan.preempted)
        wanted = PredictedReserve(1000)._still_wanted(table.running, table.block_tokens)
        assert table.most_promised_blocks >= wanted, "they may take more than was said"
        shares = dict(plan.shares)
        chosen = [
            self._random.randrange(50) if each.computed_tokens + tokens == each.total_tokens else None
            for each, tokens in shares.items()
        ]
        first_times = table.commit(shares, chosen)
        table.settle(plan.room)
        for sequence in shares:
            if sequence.emitted_tokens >= sequence.submit.max_tokens:
                table.finish(sequence)
        table.check()
        self._clock.advance(0.01)
        return (
            [(each.sequence_id, tokens) for each, tokens in shares.items()],
            first_times,
            (plan.room.used_tokens, plan.room.used_context, plan.room.used_sequences, plan.room.tokens),
            table.counters.values(),
            table.counters.served_cost,
            table.standings.values(),
            table.standings.take_raised(),
            [
                (each.sequence_id, each.state, list(each.block_table), each.computed_tokens,
                 each.ever_computed_tokens, each.recomputed_tokens, each.cursor.blocks)
                for each in table.sequences.values()
            ],
            [each.sequence_id for each in table.prefills],
        )  # fmt: skip


def live_through(policy: str, blocks: int, seed: int, arrivals: list[int]) -> Taken:
    """Runs both histories and compares them."""
    quick, plain = History(policy, blocks, seed), History(policy, blocks, seed)
    taken = Taken()

    class CountedScheduler(Scheduler):
        def _hand_out_decodes(self, runners: list[Sequence]) -> bool:
            is_short = super()._hand_out_decodes(runners)
            taken.short_steps += is_short
            taken.plain_steps += not is_short
            return is_short

        def _start(self, sequence: Sequence, batch: Batch, match: Match) -> None:
            if self._table.running:
                # Whoever looked at those who run remembers it.
                taken.counted_admissions += bool(batch.memo)
                taken.sure_admissions += not batch.memo
            super()._start(sequence, batch, match)

    with pytest.MonkeyPatch.context() as patch:
        for count in [*arrivals, *[0] * 40]:
            for history in (quick, plain):
                for _ in range(count):
                    history.add()
            patch.setattr("engine.core.scheduler.Scheduler", CountedScheduler)
            got = quick.step()
            patch.setattr("engine.core.scheduler.Scheduler", PlainScheduler)
            assert got == plain.step()
    taken.preempted = quick.preempted
    return taken


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    blocks=st.integers(12, 90),
    seed=st.integers(0, 2**16),
    arrivals=st.lists(st.integers(0, 3), min_size=5, max_size=40),
)
def test_the_short_ways_are_the_plain_ones(policy: str, blocks: int, seed: int, arrivals: list[int]) -> None:
    live_through(policy, blocks, seed, arrivals)


def test_the_histories_take_all_ways_and_run_out_of_memory() -> None:
    tight = [live_through("hybrid", 13, seed, [2, 0, 1] * 10) for seed in range(8)]
    ample = [live_through("hybrid", 30, seed, [2, 0, 1] * 10) for seed in range(8)]
    assert sum(each.short_steps for each in tight) > 50
    assert sum(each.plain_steps for each in tight) > 50
    assert sum(each.preempted for each in tight) > 5
    assert sum(each.counted_admissions for each in tight) > 50
    assert sum(each.counted_admissions for each in ample) > 20
    assert sum(each.sure_admissions for each in ample) > 50


def answers(rng: random.Random) -> tuple[bool, bool, bool]:
    """Whether a random candidate fits beside random others: by the short way, and by a look at them all. And
    whether it is only the lane of small ones that could keep it out."""
    admit = PredictedReserve(rng.choice((0, 500, 1000)), small_permille=rng.choice((0, 100, 300)))
    running = [start(random_sequence(rng, f"r{number}", longest=200)) for number in range(rng.randint(1, 8))]
    candidate = random_sequence(rng, "candidate", longest=200)
    for sequence in (*running, candidate):
        sequence.yields_cost = rng.choice((0, 50))
    most = sum(-(-(each.prompt_tokens + each.submit.max_tokens) // 16) for each in running)
    held = sum(len(each.block_table) for each in running)
    batch = make_batch(running, num_blocks=held + rng.randint(0, 60))
    batch.kept_blocks = rng.choice((0, 7))

    def fits() -> bool:
        batch.memo.clear()
        return admit.blocks_wanted(candidate, batch) + batch.kept_blocks <= batch.free_blocks

    plain = fits()
    batch.most_promised_blocks = most - held
    own = PredictedReserve(admit.permille).blocks_wanted(candidate, make_batch([]))
    is_kept_out = not plain and most - held + own + batch.kept_blocks <= batch.free_blocks
    return fits(), plain, is_kept_out


def test_a_candidate_fits_by_the_short_way_where_it_fits_by_the_plain_one() -> None:
    found = [answers(random.Random(seed)) for seed in range(3000)]
    assert all(short == plain for short, plain, _ in found)
    assert 500 < sum(plain for _, plain, _ in found) < 2500
    assert sum(is_kept_out for *_, is_kept_out in found) > 5
