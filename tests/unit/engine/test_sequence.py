"""State transitions of a sequence, and tokens computed for the first time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine.messages import SamplingParams, SequenceState, Submit
from engine.sequence import IllegalMove, Sequence, SequenceStatus, move, stable_seed
from tests.support.builders import submit


def make_submit(**changes: Any) -> Submit:
    return submit(**({"request_id": "r", "prompt_token_ids": [1, 2, 3, 4], "max_tokens": 8} | changes))


def make_sequence(state: SequenceStatus = SequenceStatus.WAITING, **changes: object) -> Sequence:
    sequence = Sequence.of(make_submit(**changes), "gateway", 0.0)
    sequence.state = state
    return sequence


ALLOWED = [
    "waiting running", "running paused", "paused running", "running preempted", "paused preempted",
    "preempted waiting", "running swapped", "paused swapped", "swapped running", "swapped preempted",
    "waiting finished", "running finished", "paused finished", "swapped finished", "preempted finished",
]  # fmt: skip
"""Written out by hand, so that the table in the code is not its own judge."""


@pytest.mark.parametrize("pair", [f"{a} {b}" for a, b in itertools.product(SequenceStatus, SequenceStatus)])
def test_a_sequence_makes_the_allowed_moves_and_no_others(pair: str) -> None:
    before, after = (SequenceStatus(name) for name in pair.split())
    sequence = make_sequence(before)
    if pair in ALLOWED:
        move(sequence, after)
        assert sequence.state is after
    else:
        with pytest.raises(IllegalMove, match="cannot become"):
            move(sequence, after)
        assert sequence.state is before


def test_a_finished_sequence_never_comes_back() -> None:
    for state in SequenceStatus:
        with pytest.raises(IllegalMove):
            move(make_sequence(SequenceStatus.FINISHED), state)


def test_preempted_work_goes_through_the_queue_before_it_runs_again() -> None:
    with pytest.raises(IllegalMove):
        move(make_sequence(SequenceStatus.PREEMPTED), SequenceStatus.RUNNING)


def test_only_prompt_tokens_that_were_never_computed_count_as_first_time() -> None:
    sequence = make_sequence()
    assert sequence.first_time_prompt_tokens(0, 3) == 3
    sequence.ever_computed_tokens = 3
    assert sequence.first_time_prompt_tokens(3, 1) == 1
    assert sequence.first_time_prompt_tokens(0, 3) == 0, "preempted"
    assert sequence.first_time_prompt_tokens(0, 4) == 1
    sequence.token_ids += [9, 9, 9]
    sequence.ever_computed_tokens = 4
    assert sequence.first_time_prompt_tokens(4, 3) == 0, "output is not prompt"


def test_the_seed_is_the_requests_and_differs_by_choice() -> None:
    sampling = SamplingParams(seed=7)
    first = stable_seed(make_submit(sampling=sampling, sequence_id="a", index=0))
    again = stable_seed(make_submit(sampling=sampling, sequence_id="b", index=0))
    other_choice = stable_seed(make_submit(sampling=sampling, sequence_id="a", index=1))
    assert first == again != other_choice


def test_without_a_seed_it_comes_from_the_sequence_id_alone() -> None:
    first = stable_seed(make_submit(sequence_id="a"))
    assert first == stable_seed(make_submit(sequence_id="a", tenant_id="other", max_tokens=3))
    assert first != stable_seed(make_submit(sequence_id="b"))
    assert 0 <= first < 2**63


def test_the_lease_and_the_maximum_both_bound_what_may_be_emitted() -> None:
    sequence = make_sequence(lease_tokens=2)
    sequence.token_ids += [5]
    assert sequence.may_emit
    sequence.token_ids += [5]
    assert not sequence.may_emit
    sequence.lease_tokens = 100
    assert sequence.may_emit
    sequence.token_ids += [5] * 6
    assert not sequence.may_emit


def test_a_restored_sequence_without_a_lease_rests_without_kv() -> None:
    state = SequenceState(
        submit=make_submit(lease_tokens=2), output_token_ids=[5, 6], text_sent=0, kv_tokens=4
    )
    sequence = Sequence.restored(state, 1.0)
    assert sequence.state is SequenceStatus.PREEMPTED
    assert sequence.emitted_tokens == 2
    assert sequence.first_time_prompt_tokens(0, 4) == 0, "what was charged elsewhere is not charged again"


def test_its_deadlines_count_from_its_arrival_on_the_engines_clock() -> None:
    submit = make_submit(deadline_in_s=3.0, own_deadline_in_s=1.0)
    entry = Sequence.of(submit, "gateway", 100.0).entry()
    assert (entry.deadline_s, entry.own_deadline_s) == (103.0, 101.0)
    entry = make_sequence().entry()
    assert (entry.deadline_s, entry.own_deadline_s) == (None, None)
