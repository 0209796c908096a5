"""Requests go only to replicas that can do what they need, also in a queue that gateways share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.entry import QueueEntry
from gateway.flow.controller import Ticket
from gateway.flow.window import Replica
from tests.support.builders import flow_controller
from tests.unit.gateway.flow.test_shared_protocol import answer, make_session, said

PLAIN, TOOLS = frozenset({"text"}), frozenset({"text", "tools"})
ABLE, UNABLE = Replica("able", 2, 1000, offers=TOOLS), Replica("unable", 9, 9000, offers=PLAIN)


def ticket(name: str, needs: frozenset[str] = PLAIN, tenant: str = "t") -> Ticket:
    return Ticket(QueueEntry(name, tenant, 0.0, 10, 10), 1, 20, needs=needs)


def test_only_a_replica_that_can_gets_it_however_busy() -> None:
    flow = flow_controller()
    for number in range(3):
        assert flow.enqueue(ticket(f"tools-{number}", TOOLS), 0.0) is None
    turns = flow.dispatch(0.0, [ABLE, UNABLE])
    assert [each.replica_id for each in turns] == ["able", "able"]
    flow.finish("tools-0", 10, 10, 1.0)
    assert [each.ticket.entry.entry_id for each in flow.dispatch(1.0, [ABLE, UNABLE])] == ["tools-2"]


def test_what_none_can_run_holds_up_nothing_of_another_lane_and_gets_no_room_kept() -> None:
    flow = flow_controller()
    assert flow.enqueue(ticket("tools", TOOLS), 0.0) is None
    assert flow.dispatch(0.0, [UNABLE]) == []
    assert flow.cancel("tools", 0.0)
    assert flow.enqueue(ticket("plain"), 0.0) is None
    assert [each.replica_id for each in flow.dispatch(0.0, [UNABLE])] == ["unable"]


def acts(message: Any) -> list[Any]:
    return list(said(message)[2])


def test_a_shared_queue_hears_which_replicas_a_request_cannot_use_and_what_changes() -> None:
    session = make_session()
    replica = Replica("engine-0", 4, 1000, offers=PLAIN)
    session.message(0.0, [replica])
    session.answered(answer(), 0.0)
    for name, needs in (("r1", TOOLS), ("r2", PLAIN)):
        made = ticket(name, needs)
        assert session.mirror.enqueue(made, 0.0) is None
        session.arrived(made)
    arrived = {act[1]: act[2]["unfit"] for act in acts(session.message(0.0, [replica]))}
    assert arrived == {"r1": {"engine-0": True}, "r2": {}}
    session.answered(answer(), 0.0)
    assert not session.sees_others([replica])
    able = replace(replica, offers=TOOLS)
    assert session.sees_others([able])
    changed = acts(session.message(1.0, [able]))
    assert sorted(changed) == [["unfit", "r1", {}], ["unfit", "r2", {}]]
    session.answered(answer(), 1.0)
    assert acts(session.message(2.0, [able])) == []
