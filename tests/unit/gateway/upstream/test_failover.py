"""Which replica a sequence goes to that was not begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from gateway.upstream.base import NotBegun, UpstreamUnavailable
from gateway.upstream.failover import next_replica

CLOSED = NotBegun("closed", "it closed the connection")
FAILED = NotBegun("status", "500")
AWAY = NotBegun("away", "502")
UNAVAILABLE = UpstreamUnavailable()


@dataclass
class Server:
    replica_id: str
    is_up: bool = True
    is_drained: bool = False


def test_another_one_that_serves_and_is_not_drained() -> None:
    first, drained, away, good = Server("a"), Server("b", is_drained=True), Server("c", False), Server("d")
    assert next_replica([first], [drained, away, good], [CLOSED]) is good
    assert next_replica([first, good], [drained, away, good], [CLOSED, UNAVAILABLE]) is None


def test_the_same_one_again_where_the_connection_was_to_blame_also_while_it_drains() -> None:
    first, drained = Server("a", is_drained=True), Server("b", is_drained=True)
    assert next_replica([first], [drained], [CLOSED]) is first
    assert next_replica([first], [drained], [FAILED]) is None
    assert next_replica([first] * 3, [Server("c")], [AWAY] * 3) is None


@pytest.mark.parametrize(
    ("errors", "goes_on"),
    [
        ([FAILED], True),
        ([FAILED, FAILED], False),
        ([FAILED, CLOSED], False),
        ([CLOSED, NotBegun("garbage", "")], False),
        ([AWAY, NotBegun("connect", "")], True),
        ([NotBegun("key", ""), FAILED], True),
        ([UNAVAILABLE, FAILED], True),
    ],
)
def test_what_may_be_the_requests_own_fault_is_tried_on_one_other(
    errors: Sequence[Exception], goes_on: bool
) -> None:
    first, second, third = Server("a"), Server("b"), Server("c")
    found = next_replica([first, second][: len(errors)], [second, third], errors)
    assert found is ([second, third][len(errors) - 1] if goes_on else None)
