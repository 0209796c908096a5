"""The lane of small requests past large ones."""

from __future__ import annotations

from engine.scheduling.admit.buckets import LengthBuckets
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.order.buckets import bucket_size
from engine.sequence import Sequence
from tests.support.scheduling_states import make_batch, make_sequence, start


def of_length(name: str, total: int, **changes: object) -> Sequence:
    return make_sequence(name, prompt=total, predicted=20, **changes)  # type: ignore[arg-type]


def test_large_ones_leave_a_lane_and_small_ones_may_take_of_what_those_are_promised() -> None:
    """Ten blocks of a hundred; a running large one still wants 15, of small ones 4 hold a block each."""
    admit, plain = PredictedReserve(500, small_permille=100), PredictedReserve(500)
    large = start(make_sequence("large", prompt=40, predicted=120, max_tokens=200), 4)
    large.yields_cost = 1
    small = [start(make_sequence(f"small{number}", prompt=3, predicted=1), 4) for number in range(4)]
    newcomer, next_large = (
        make_sequence("s", prompt=3, predicted=1),
        make_sequence("l", prompt=40, predicted=8),
    )
    next_large.yields_cost = 1

    def wanted(which: PredictedReserve, candidate: Sequence, running: list[Sequence]) -> int:
        return which.blocks_wanted(candidate, make_batch(running, block_tokens=4, num_blocks=100))

    assert wanted(plain, newcomer, [large]) == 15 + 1
    assert wanted(admit, newcomer, [large]) == 15 + 1 - 10
    assert wanted(admit, next_large, [large]) == wanted(plain, next_large, [large]), "no small one runs"
    assert wanted(admit, next_large, [large, *small]) == wanted(plain, next_large, [large]) + 4
    many = [start(make_sequence(f"m{number}", prompt=3, predicted=1), 4) for number in range(30)]
    assert wanted(admit, next_large, [large, *many]) == wanted(plain, next_large, [large]) + 10
    # What small ones are promised themselves is not to be had.
    growing = start(make_sequence("g", prompt=4, predicted=80, max_tokens=90), 4)
    assert wanted(admit, newcomer, [growing]) == wanted(plain, newcomer, [growing]) == 10 + 1


def test_while_a_prompt_decodes_any_length_may_start() -> None:
    admit = LengthBuckets()
    running = [start(of_length("r", 200))]
    running[0].computed_tokens = running[0].total_tokens - 1
    assert admit.joins(of_length("shorter", 20), make_batch(running)) is None


def test_order_and_admission_sort_by_the_same_length() -> None:
    sequence = of_length("s", 200)
    sequence.found_tokens = 150
    admit, same = LengthBuckets(), of_length("same", 50)
    assert bucket_size(sequence.entry()) == 50
    assert admit.bucket(sequence) == admit.bucket(same)
