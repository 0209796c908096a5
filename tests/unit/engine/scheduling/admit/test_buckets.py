"""Length-bucket admission and suspension."""

from __future__ import annotations

import pytest

from engine.scheduling.admit.base import Defer
from engine.scheduling.admit.buckets import MOST_SUSPENSIONS, REST_STEPS, LengthBuckets
from engine.sequence import Sequence
from tests.support.scheduling_states import make_batch, make_sequence, start


def of_length(name: str, total: int, **changes: object) -> Sequence:
    return make_sequence(name, prompt=total, predicted=20, **changes)  # type: ignore[arg-type]


def test_a_batch_takes_in_its_like() -> None:
    admit = LengthBuckets()
    running = [start(of_length("r", 200))]
    assert admit.joins(of_length("like", 255), make_batch(running)) is None
    assert admit.joins(of_length("longer", 256), make_batch(running)) == Defer("bucket 7 runs")
    assert admit.joins(of_length("shorter", 127), make_batch(running)) == Defer("bucket 7 runs")
    assert admit.joins(of_length("any", 9000), make_batch([])) is None


def test_in_a_bucket_lengths_lie_within_the_ratio() -> None:
    for ratio in (1.5, 2.0, 4.0):
        admit = LengthBuckets(ratio=ratio)
        by_bucket: dict[int, list[int]] = {}
        for total in range(21, 5000):
            by_bucket.setdefault(admit.bucket(of_length("s", total)), []).append(total)
        assert len(by_bucket) > 3
        assert all(max(lengths) <= ratio * min(lengths) for lengths in by_bucket.values())


def long_ones(count: int) -> list[Sequence]:
    return [
        start(make_sequence(f"long{number}", prompt=900, output=5, predicted=400, max_tokens=500))
        for number in range(count)
    ]


def test_long_ones_are_suspended_for_a_short_one_that_has_waited() -> None:
    admit = LengthBuckets(suspend_after_s=0.5)
    running = long_ones(3)
    short = of_length("short", 30, submitted_s=1.0)
    assert admit.suspends(short, make_batch(running, now_s=1.4)) == []
    assert admit.suspends(short, make_batch(running, now_s=1.5)) == running
    assert admit.suspensions == 3


@pytest.mark.parametrize("why", ["near", "tier", "starts", "ends soon", "memory", "mixed"])
def test_long_ones_are_left_alone(why: str) -> None:
    admit = LengthBuckets()
    running = long_ones(2)
    short = of_length("short", 600 if why == "near" else 30)
    changes: dict[str, int] = {}
    if why == "tier":
        short = of_length("short", 30, tier=0)
    elif why == "starts":
        running[1].token_ids = running[1].token_ids[:900]
    elif why == "ends soon":
        running[1].computed_tokens = running[1].total_tokens - 10
    elif why == "memory":
        changes["num_blocks"] = sum(len(each.block_table) for each in running)
    elif why == "mixed":
        running.append(start(of_length("between", 50)))
    assert admit.suspends(short, make_batch(running, now_s=100.0, **changes)) == []
    assert admit.suspensions == 0


def test_suspensions_are_far_apart_and_few() -> None:
    admit = LengthBuckets()
    running = long_ones(1)
    short = of_length("short", 30)
    times = []
    for step in range(4 * REST_STEPS):
        admit.stepped()
        if admit.suspends(short, make_batch(running, now_s=100.0)):
            times.append(step)
    assert times == [0, REST_STEPS]
    assert len(times) == MOST_SUSPENSIONS


def test_suspended_ones_return_with_their_like_or_when_nothing_runs() -> None:
    admit = LengthBuckets(longest_pause_s=5.0)
    [long] = running = long_ones(1)
    short = of_length("short", 30)
    assert admit.suspends(short, make_batch(running, now_s=100.0)) == [long]
    long.is_suspended, long.paused_since_s = True, 100.0
    shorts = [start(of_length("runs", 30))]
    assert admit.joins(short, make_batch(shorts, now_s=104.9)) is None
    assert admit.joins(long, make_batch(shorts, now_s=104.9)) == Defer("bucket 4 runs")
    # After so long the short ones let the batch run dry.
    assert admit.joins(short, make_batch(shorts, now_s=105.0)) == Defer("suspended ones go first")
    assert admit.joins(long, make_batch([], now_s=105.0)) is None
    long.is_suspended = False
    assert admit.joins(short, make_batch(shorts, now_s=105.1)) is None
