"""Which replica a sequence goes to that was not begun."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.upstream.base import NotBegun, UpstreamUnavailable
from gateway.upstream.failover import next_replica

CLOSED = NotBegun("closed", "it closed the connection")


@dataclass
class Server:
    replica_id: str
    is_up: bool = True
    is_drained: bool = False


def test_another_one_that_serves_and_is_not_drained() -> None:
    first, drained, away, good = Server("a"), Server("b", is_drained=True), Server("c", False), Server("d")
    assert next_replica([first], [drained, away, good], CLOSED) is good
    assert next_replica([first, good], [drained, away, good], UpstreamUnavailable()) is None


def test_the_same_one_again_where_the_connection_was_to_blame_also_while_it_drains() -> None:
    first, drained = Server("a", is_drained=True), Server("b", is_drained=True)
    assert next_replica([first], [drained], CLOSED) is first
    assert next_replica([first], [drained], NotBegun("status", "500")) is None
    assert next_replica([first] * 3, [Server("c")], CLOSED) is None
