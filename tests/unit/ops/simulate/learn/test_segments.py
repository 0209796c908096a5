"""The cut of a trace into what is learned from and what is held out."""

from __future__ import annotations

import pytest

from ops.simulate.learn.segments import JITTER_S, LONGEST_S, MOST_REQUESTS, some_of, split
from ops.simulate.traffic.requests import SimulatedRequest


def even(seconds: float, per_s: float = 2.0) -> list[SimulatedRequest]:
    """Each with an input length of its own: its name."""
    return [
        SimulatedRequest(100.0 + number / per_s, "one", 1 + number, 5)
        for number in range(int(seconds * per_s))
    ]


@pytest.mark.parametrize(
    ("seconds", "stretch_s", "pieces"),
    [(241, 60, (2, 2)), (600, 120, (3, 2)), (3_600, 150, (12, 12)), (4 * 3_600, 600, (60, 60))],
)
def test_every_other_stretch_is_held_out_and_no_request_is_in_both(
    seconds: float, stretch_s: float, pieces: tuple[int, int]
) -> None:
    requests = even(seconds)
    parts = split("even", requests)
    assert parts.stretch_s == pytest.approx(stretch_s, rel=0.01)
    assert (len(parts.learnt_from), len(parts.held_out)) == pieces
    learnt, held = (
        {request.input_tokens for piece in half for request in piece}
        for half in (parts.learnt_from, parts.held_out)
    )
    assert not learnt & held
    assert learnt | held == {request.input_tokens for request in requests}


def test_a_trace_of_days_is_held_out_by_the_hour() -> None:
    parts = split("days", even(50 * 3_600, 0.1))
    assert parts.stretch_s == LONGEST_S
    in_hour = int(LONGEST_S / parts.piece_s)
    assert {piece.number // in_hour % 2 for piece in parts.learnt_from} == {0}
    assert {piece.number // in_hour % 2 for piece in parts.held_out} == {1}


@pytest.mark.parametrize("requests", [[], even(200, 5), even(3_600, 0.1)])
def test_what_is_too_short_to_hold_any_out_is_refused_with_the_least(
    requests: list[SimulatedRequest],
) -> None:
    with pytest.raises(ValueError, match=r"at least 400 requests over 240 s are needed; take a longer"):
        split("short", requests)


def test_more_requests_than_a_search_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"more than 1,000,000 requests; take fewer days"):
        split("long", even(1.0, 1.0) * (MOST_REQUESTS + 1))


def test_a_gap_that_leaves_too_few_stretches_is_refused() -> None:
    late = [SimulatedRequest(100_000.0 + each.arrival_s, "one", 1, 1) for each in even(100)]
    with pytest.raises(ValueError, match="stretches"):
        split("gap", [*even(250), *late])


def test_seeds_move_arrivals_a_little_and_the_same_seed_alike() -> None:
    piece = split("even", even(241)).learnt_from[0]
    once, again, other = piece.jittered(1), piece.jittered(1), piece.jittered(2)
    assert once == again != other
    before = {request.input_tokens: request.arrival_s for request in piece}
    assert len(once) == len(piece)
    assert all(abs(before[request.input_tokens] - request.arrival_s) <= JITTER_S for request in once)
    times = [request.arrival_s for request in once]
    assert times == sorted(times)


def test_some_pieces_are_evenly_spaced_and_never_none() -> None:
    pieces = split("even", even(3_600)).learnt_from
    numbers = [piece.number for piece in some_of(pieces, 4 * len(pieces[0]))]
    assert numbers == [pieces[index].number for index in (0, 3, 6, 9)]
    assert len(some_of(pieces, 1)) == 1
    assert some_of((), 1) == ()
