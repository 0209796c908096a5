"""What a placer starts, ends and writes, and what it says of each replica."""

from __future__ import annotations

import pytest

from ops.placement.plan import ReplicaReport, decide, lack_of, state_of

SERVES = ReplicaReport("10.0.0.5", "tcp://10.0.0.5:40001")
STARTS = ReplicaReport("10.0.0.6")


def test_what_is_missing_starts_and_what_serves_is_written() -> None:
    reports = {"a": SERVES, "b": STARTS, "c": None}
    assert decide(["a", "b", "c", "d"], reports, {"a"}) == (["d"], [], {"a": SERVES})


def test_what_is_not_wanted_ends_whether_it_is_placed_or_only_written() -> None:
    assert decide(["a"], {"a": STARTS, "c": SERVES}, {"a", "b"}) == ([], ["b", "c"], {})


def test_a_replica_that_is_wanted_and_does_not_answer_is_neither_started_twice_nor_ended() -> None:
    assert decide(["a"], {"a": None}, {"a"}) == ([], [], {})


@pytest.mark.parametrize(
    ("report", "lack", "text"),
    [
        (SERVES, "", "serves at tcp://10.0.0.5:40001"),
        (STARTS, "", "starts on 10.0.0.6"),
        (ReplicaReport("10.0.0.6", why="no keys"), "", "cannot start on 10.0.0.6: no keys"),
        (None, "it needs 1 GPU", "waits for room: it needs 1 GPU"),
        (None, "", "does not answer yet"),
    ],
)
def test_the_state_is_one_line(report: ReplicaReport | None, lack: str, text: str) -> None:
    assert state_of(report, lack) == text


@pytest.mark.parametrize(
    ("need", "free", "lack"),
    [
        ({"CPU": 1}, {"CPU": 2}, ""),
        ({"CPU": 1}, {"CPU": 0.5}, "it needs 1 CPU, and 0.5 of the cluster's are free"),
        ({"CPU": 1, "GPU": 1}, {"CPU": 2}, "it needs 1 GPU, and no machine has more than 0"),
        ({"CPU": 3}, {"CPU": 4}, "it needs 3 CPU, and no machine has more than 2"),
    ],
)
def test_what_one_more_replica_lacks(need: dict[str, float], free: dict[str, float], lack: str) -> None:
    assert lack_of(need, [{"CPU": 2}, {"CPU": 2}], free) == lack
