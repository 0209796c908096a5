"""Moves of the control loop: kept with their reasons, written once, bounded, found page by page."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from gateway.flow.control_rules import Control, ControlMode, Move, Observation
from gateway.flow.knobs import Knob
from gateway.records import move_recorder
from gateway.records.move_recorder import MoveRecorder
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.counts import move_store
from tenants.counts.move_store import StoredMove
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.resources.moves import MOVES, MoveQuery
from tenants.resources.reading import read_page
from tenants.storage.database import Database
from tests.support.builders import site
from tests.support.quota import NOON_S, Clock

FULL = Observation(10.0, 0.0, 0.95, 0.0, 0.02, None, 5)
DROPPED = "fairgate_control_moves_dropped_total"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def recorder(database: Database, registry: CollectorRegistry, clock: Clock) -> MoveRecorder:
    return MoveRecorder(site(database, clock, registry, "gw_1"))


@pytest.fixture
def admin(database: Database, pepper: bytes) -> Admin:
    return Admin(Transactions(database, pepper))


def move(knob: Knob = Knob.LOOKAHEAD, after: float = 1.0, *, is_made: bool = True) -> Move:
    return Move(0.0, knob, 2.0, after, "KV nearly full (0.95)", is_made)


def looked(mode: ControlMode) -> tuple[Control, list[Move]]:
    control = Control(mode)
    return control, control.look(FULL, 0.0)


async def test_moves_are_kept_in_their_order_with_their_reasons(recorder: MoveRecorder, admin: Admin) -> None:
    control, moves = looked(ControlMode.ACTING)
    assert len(moves) > 2
    recorder.note("small", control, moves)
    advising, advised = looked(ControlMode.ADVICE)
    recorder.note("large", advising, advised)
    await recorder.flush()
    await recorder.flush()

    rows = (await read_page(admin, MOVES, MoveQuery())).rows
    assert [(row.model, row.knob, row.is_made) for row in reversed(rows)] == [
        *(("small", each.knob.value, True) for each in moves),
        *(("large", each.knob.value, False) for each in advised),
    ]
    assert {row.reason for row in rows} == {"KV nearly full (0.95)"}
    assert {(row.mode, row.gateway_id, row.at_us) for row in rows} == {
        (mode, "gw_1", round(NOON_S * 1e6)) for mode in ("acting", "advice")
    }
    made = next(row for row in rows if (row.model, row.knob) == ("small", "lookahead"))
    assert (made.before, made.after, made.knobs["lookahead"], made.knobs["batch_cap"]) == (2, 1, 1, 0.875)
    told = next(row for row in rows if (row.model, row.knob) == ("large", "lookahead"))
    assert (told.before, told.after, told.knobs["lookahead"]) == (2, 1, 2), "where it really stands"
    assert made.as_json()["at"] == "2023-11-16T12:00:20+00:00"


def test_there_is_no_move_without_its_reason() -> None:
    with pytest.raises(ValueError, match="lookahead 2 -> 1: a move needs its reason"):
        Move(0.0, Knob.LOOKAHEAD, 2.0, 1.0, "", is_made=True)


async def test_what_cannot_be_written_waits_and_the_oldest_give_way(
    recorder: MoveRecorder,
    registry: CollectorRegistry,
    admin: Admin,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(move_recorder, "MAX_WAITING", 3)
    control = Control(ControlMode.ACTING)

    async def away(database: Database, moves: object) -> None:
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(move_store, "add", away)
        for after in range(5):
            recorder.note("small", control, [move(after=after)])
            await recorder.close()
    assert registry.get_sample_value(DROPPED) == 2
    await recorder.close()
    assert [row.after for row in (await read_page(admin, MOVES, MoveQuery())).rows] == [4, 3, 2]


async def test_a_batch_whose_answer_was_lost_is_written_once(
    recorder: MoveRecorder, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = move_store.add

    async def unanswered(database: Database, moves: list[StoredMove]) -> None:
        await really(database, moves)
        raise DatabaseUnavailable("the answer was lost")

    recorder.note("small", Control(ControlMode.ACTING), [move(after=1), move(after=0)])
    with monkeypatch.context() as patched:
        patched.setattr(move_store, "add", unanswered)
        await recorder.close()
    await recorder.flush()
    assert [row.after for row in (await read_page(admin, MOVES, MoveQuery())).rows] == [0, 1]


async def test_old_ones_and_too_many_are_purged(
    recorder: MoveRecorder, admin: Admin, database: Database, clock: Clock
) -> None:
    control = Control(ControlMode.ACTING)
    for after in range(4):
        recorder.note("small", control, [move(after=after), move(after=after + 0.5)])
        await recorder.flush()
        clock.now_s += 60
    assert await move_store.purge(database, clock.now_s, most_rows=5) == 3
    kept = [row.after for row in (await read_page(admin, MOVES, MoveQuery())).rows]
    assert kept == [3.5, 3, 2.5, 2, 1.5]
    clock.now_s = NOON_S + 90 + move_store.KEPT_S
    await recorder.purge()
    assert [row.after for row in (await read_page(admin, MOVES, MoveQuery())).rows] == [3.5, 3, 2.5, 2]


async def test_pages_and_filters(recorder: MoveRecorder, admin: Admin, clock: Clock) -> None:
    control = Control(ControlMode.ACTING)
    for number in range(6):
        recorder.note(
            "large" if number % 3 == 0 else "small",
            control,
            [move(Knob.LOOKAHEAD if number % 2 else Knob.AGEING, after=number, is_made=number != 4)],
        )
        clock.now_s += 60
    await recorder.flush()

    async def found(**filters: object) -> list[float]:
        rows: list[float] = []
        cursor, query = None, MoveQuery(**filters)  # type: ignore[arg-type]
        while True:
            page = await read_page(admin, MOVES, query, cursor=cursor, limit=2)
            rows += [row.after for row in page.rows]
            if (cursor := page.next_cursor) is None:
                return rows

    assert await found() == [5, 4, 3, 2, 1, 0]
    assert await found(knob="lookahead", model="small") == [5, 1]
    assert await found(made=True, model="small") == [5, 2, 1]
    for query, field in ((MoveQuery(knob=""), "knob"), (MoveQuery(model="a\0"), "model")):
        with pytest.raises(Invalid) as refused:
            await read_page(admin, MOVES, query)
        assert refused.value.field == field


async def test_a_page_looks_at_few_rows(
    recorder: MoveRecorder, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.admin.lists.scans.MOST_SCANNED", 4)
    control = Control(ControlMode.ACTING)
    recorder.note("small", control, [move(after=number, is_made=number == 0) for number in range(10)])
    await recorder.flush()
    cursor, found, pages = None, [], 0
    for _ in range(5):
        page = await read_page(admin, MOVES, MoveQuery(made=True), cursor=cursor)
        found += [row.after for row in page.rows]
        if (cursor := page.next_cursor) is None:
            break
        pages += 1
    assert (found, pages) == ([0], 2), "four rows looked at by each full page"
