"""Static, dynamic and table-driven batches."""

from __future__ import annotations

from engine.scheduling.admit.base import Batch, Defer
from engine.scheduling.admit.batch_gate import RUNS
from engine.scheduling.admit.static import StaticBatch
from engine.scheduling.admit.table import BatchOrWait
from engine.scheduling.admit.window import DynamicWindow
from engine.scheduling.batch_or_wait.wait_table import TableAction
from engine.sequence import Sequence
from tests.support.scheduling_states import execute, make_batch, make_sequence, start


def let_in(admit: StaticBatch | DynamicWindow | BatchOrWait, running: list[Sequence], name: str) -> Sequence:
    sequence = start(make_sequence(name))
    running.append(sequence)
    admit.admitted(sequence, make_batch(running))
    return sequence


def test_a_static_batch_is_filled_once_and_closed_until_all_have_finished() -> None:
    admit = StaticBatch(size=3)
    running: list[Sequence] = []
    candidate = make_sequence("candidate")
    for number in range(3):
        assert admit.joins(candidate, make_batch(running, num_waiting=5 - number)) is None
        let_in(admit, running, f"s{number}")
    assert admit.joins(candidate, make_batch(running, num_waiting=2)) == RUNS
    running.pop()
    assert admit.joins(candidate, make_batch(running, num_waiting=2)) == RUNS
    running.clear()
    assert admit.joins(candidate, make_batch(running, num_waiting=2)) is None


def test_a_static_batch_takes_those_who_waited_when_it_was_opened() -> None:
    admit = StaticBatch(size=10)
    running: list[Sequence] = []
    assert admit.joins(make_sequence("s0"), make_batch(running, num_waiting=2)) is None
    let_in(admit, running, "s0")
    # The next one's prompt did not fit into the first step.
    admit.stepped()
    assert admit.joins(make_sequence("s1"), make_batch(running, num_waiting=5)) is None
    let_in(admit, running, "s1")
    assert admit.joins(make_sequence("s2"), make_batch(running, num_waiting=4)) == RUNS


def test_a_static_batch_waits_for_prompts_but_not_for_memory() -> None:
    admit = StaticBatch(size=10)
    running: list[Sequence] = []
    candidate = make_sequence("s1")
    assert admit.joins(make_sequence("s0"), make_batch(running, num_waiting=2)) is None
    first = let_in(admit, running, "s0")
    admit.stepped()
    admit.stepped()
    assert admit.joins(candidate, make_batch(running)) is None, "the first one's prompt is not through"
    execute(first, 4)
    assert admit.joins(candidate, make_batch(running)) == RUNS


def test_a_member_that_lost_its_memory_comes_back() -> None:
    admit = StaticBatch(size=2)
    running: list[Sequence] = []
    admit.joins(make_sequence("s0"), make_batch(running, num_waiting=2))
    let_in(admit, running, "s0")
    lost = let_in(admit, running, "s1")
    running.remove(lost)
    lost.preemptions = 1
    stranger = make_sequence("stranger")
    stranger.preemptions = 1
    assert admit.joins(lost, make_batch(running)) is None
    assert admit.joins(stranger, make_batch(running)) == RUNS


def test_a_window_is_open_for_its_time_or_until_it_is_full() -> None:
    admit = DynamicWindow(size=4, window_s=0.5)
    first = make_sequence("first", submitted_s=10.0)
    assert admit.joins(first, make_batch([], now_s=10.0, num_waiting=1)) == Defer("the window is open", 10.5)
    assert admit.joins(first, make_batch([], now_s=10.2, num_waiting=3)) == Defer("the window is open", 10.5)
    assert admit.joins(first, make_batch([], now_s=10.2, num_waiting=4)) is None
    assert admit.joins(first, make_batch([], now_s=10.5, num_waiting=2)) is None


def test_who_waited_while_a_batch_ran_waits_for_no_window() -> None:
    admit = DynamicWindow(size=4, window_s=0.5)
    running: list[Sequence] = []
    admit.joins(make_sequence("s", submitted_s=0.0), make_batch([], now_s=1.0))
    let_in(admit, running, "s")
    early, late = make_sequence("early", submitted_s=2.0), make_sequence("late", submitted_s=5.0)
    assert admit.joins(early, make_batch(running, now_s=2.0)) == RUNS
    # Another one stands at the head by then: the first one's wait counts all the same.
    assert admit.joins(late, make_batch([], now_s=5.0, num_waiting=2)) is None


def test_each_batch_has_a_window_of_its_own() -> None:
    admit = DynamicWindow(size=4, window_s=0.5)
    running: list[Sequence] = []
    admit.joins(make_sequence("s", submitted_s=0.0), make_batch([], now_s=1.0))
    let_in(admit, running, "s")
    next_one = make_sequence("next", submitted_s=9.0)
    assert admit.joins(next_one, make_batch([], now_s=9.1)) == Defer("the window is open", 9.5)


class Recorded:
    """A table that says what it was told to, and keeps what it was asked."""

    long_tokens = 30
    longest_wait_s = 0.5

    def __init__(self, *decisions: TableAction) -> None:
        self.decisions = list(decisions)
        self.asked: list[dict[str, float]] = []

    def decide(self, **situation: float) -> TableAction:
        self.asked.append(situation)
        return self.decisions.pop(0)


def test_the_table_is_asked_about_all_that_wait_and_says_how_long() -> None:
    table = Recorded(
        TableAction(0.2, 0), TableAction(0.2, 0), TableAction(0.2, 0), TableAction(0.2, 0), TableAction(0, 2)
    )
    admit = BatchOrWait(table, size=4)
    short = make_sequence("s", submitted_s=1.0, prompt=4, predicted=20)
    long = make_sequence("l", submitted_s=0.75, prompt=16, predicted=20)
    for number in range(5):
        admit.arrived(0.5 * number)

    def batch(now_s: float, waiting: int) -> Batch:
        made = make_batch([], now_s=now_s, num_waiting=waiting, num_blocks=8)
        made.waiting, made.free_blocks = (lambda: [short.entry(), long.entry()]), 6
        return made

    # The head is not the one that has waited longest, and not the long one.
    assert admit.joins(short, batch(1.0, 2)) == Defer("the table says wait", 1.2)
    assert table.asked == [
        {
            "rate_per_s": 2.0, "num_waiting": 2, "oldest_wait_s": 0.25, "has_long": True,
            "remaining_tokens": 60, "kv_pressure": 0.25,
        }
    ]  # fmt: skip
    assert admit.joins(short, batch(1.2, 2)) == Defer("the table says wait", 1.25), "it has a longest wait"
    assert admit.joins(short, batch(1.25, 2)) is None
    assert admit.joins(short, batch(1.0, 4)) is None, "a full batch"
    assert admit.joins(short, batch(1.0, 3)) is None, "the table says run"


def test_a_batch_takes_no_more_than_the_table_says() -> None:
    admit = BatchOrWait(Recorded(TableAction(0.0, 2)), size=4)
    running: list[Sequence] = []
    assert admit.joins(make_sequence("s0"), make_batch(running, num_waiting=4)) is None
    let_in(admit, running, "s0")
    assert admit.joins(make_sequence("s1"), make_batch(running, num_waiting=3)) is None
    let_in(admit, running, "s1")
    assert admit.joins(make_sequence("s2"), make_batch(running, num_waiting=2)) == RUNS


def test_a_wait_too_short_to_move_the_clock_is_none() -> None:
    admit = BatchOrWait(Recorded(TableAction(1e-30, 0)))
    assert admit.joins(make_sequence("s", submitted_s=1.0), make_batch([], now_s=1.0)) is None
