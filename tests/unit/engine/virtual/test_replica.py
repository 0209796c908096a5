"""The virtual replica: time by the step-time model, lengths as given, an audit that finds bad blocks."""

from __future__ import annotations

import pytest

from engine.messages import SamplingParams, Submit
from engine.step_time.model import PRIOR, predict_step_s
from engine.virtual.replica import EOS_TOKEN_ID, VirtualClock, VirtualReplica, VirtualRunner, VirtualText
from tests.support.step_work import SequenceSlice, run_step


def piece(block_table: list[int], *, position: int = 0, tokens: int = 6) -> SequenceSlice:
    return SequenceSlice("s", [1, 2, 3, 4, 5, 6], 6, position, tokens, block_table, True, SamplingParams(), 7)


def make_runner(*, audit: bool = True) -> VirtualRunner:
    return VirtualRunner(VirtualClock(), num_blocks=6, block_tokens=2, audit=audit)


def test_time_passes_by_the_step_time_model_only() -> None:
    replica = VirtualReplica(num_blocks=8)
    replica.submit(Submit("s", "r", "t", [1] * 10, max_tokens=2, lease_tokens=2))
    result = replica.step()
    assert result.duration_s == pytest.approx(predict_step_s(PRIOR, 10, 55, 1))
    assert replica.clock() == pytest.approx(result.duration_s)
    with pytest.raises(ValueError, match="time does not go back"):
        replica.clock.advance(-1.0)


def test_an_answer_is_as_long_as_it_was_told() -> None:
    replica = VirtualReplica(num_blocks=8)
    replica.submit(Submit("s", "r", "t", [1], max_tokens=50, lease_tokens=50), output_tokens=7)
    tokens: list[int] = []
    while replica.core.has_work():
        for delta in replica.step().deltas["virtual"]:
            tokens += delta.token_ids
    assert len(tokens) == 7
    assert [token == EOS_TOKEN_ID for token in tokens] == [False] * 6 + [True]


def test_the_token_depends_on_every_block_of_the_context() -> None:
    runner = make_runner()
    (clean,) = run_step(runner, [piece([0, 1, 2])])
    (elsewhere,) = run_step(runner, [piece([5, 3, 4])])
    assert clean == elsewhere, "where the blocks lie does not matter"
    run_step(runner, [piece([1], tokens=2)])  # another sequence writes into block 1
    (aliased,) = run_step(runner, [piece([0, 1, 2], position=5, tokens=1)])
    assert aliased != clean
    (unwritten,) = run_step(make_runner(), [piece([0, 1, 2], position=5, tokens=1)])
    assert unwritten != clean


def test_kv_can_be_carried_to_other_blocks() -> None:
    here, there = make_runner(), make_runner()
    (expected,) = run_step(here, [piece([0, 1, 2])])
    kv = here.read_kv([0, 1, 2], 5)
    there.write_kv([4, 2, 0], 5, kv)
    assert run_step(there, [piece([4, 2, 0], position=5, tokens=1)]) == [expected]
    with pytest.raises(ValueError, match="not the KV of 4 tokens"):
        there.write_kv([4, 2], 4, kv)
    assert make_runner(audit=False).read_kv([0], 2) == []


def test_its_text_never_shows_the_start_of_a_stop_string() -> None:
    text = VirtualText(("bcd",))
    shown = [text.push(ord(letter) - ord("a")) for letter in "abcabcd"]
    assert shown == ["a", "", "", "bca", "", "", ""]
    assert text.stopped == "bcd"
    assert text.flush() == ""
