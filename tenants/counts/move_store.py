"""Moves of control loops and their storage: written in batches, read newest first, purged by age and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, select
from sqlalchemy.sql import ColumnElement

from tenants.instants import from_us
from tenants.storage.database import Database
from tenants.storage.tables import control_moves
from tenants.storage.upserts import insert

MAX_MODEL_CHARACTERS = 256
MAX_KNOB_CHARACTERS = 32
MAX_REASON_CHARACTERS = 200
KEPT_S = 90 * 86_400
MAX_ROWS = 200_000
MAX_PURGED = 20_000
"""Rows removed by one statement, so that it does not block other writes for long."""


class StoredMove(msgspec.Struct, frozen=True):
    """One knob, moved or advised to."""

    move_id: str
    """Sorts by the order in which one gateway moved."""
    at_us: int
    """Microseconds since 1970."""
    gateway_id: str
    model: str
    knob: str
    before: float
    after: float
    reason: str
    is_made: bool
    """False: only advised."""
    mode: str
    """Of the control loop then."""
    knobs: dict[str, float]
    """All knobs of this model right after the observation that led to this move."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.move_id,
            "object": "control_move",
            "at": from_us(self.at_us).isoformat(),
            "gateway_id": self.gateway_id,
            "model": self.model,
            "knob": self.knob,
            "before": self.before,
            "after": self.after,
            "reason": self.reason,
            "is_made": self.is_made,
            "mode": self.mode,
            "knobs": self.knobs,
        }


async def add(database: Database, moves: Sequence[StoredMove]) -> None:
    """Existing moves stay, so that a batch can be repeated. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> None:
        rows = [
            msgspec.structs.asdict(move) | {"knobs": msgspec.json.encode(move.knobs).decode()}
            for move in moves
        ]
        connection.execute(insert(connection, control_moves).on_conflict_do_nothing(), rows)

    if moves:
        await database.write(work)


def where(connection: Connection, conditions: Sequence[ColumnElement[bool]], most: int) -> list[StoredMove]:
    columns = [control_moves.c[name] for name in StoredMove.__struct_fields__]
    order = (control_moves.c.at_us.desc(), control_moves.c.move_id.desc())
    query = select(*columns).where(*conditions).order_by(*order).limit(most)
    rows = [row._asdict() for row in connection.execute(query)]
    return [
        StoredMove(**row | {"knobs": msgspec.json.decode(row["knobs"], type=dict[str, float])})
        for row in rows
    ]


async def purge(database: Database, now_s: float, most_rows: int = MAX_ROWS) -> int:
    """Deletes at most `MAX_PURGED` moves, beyond `KEPT_S` or `most_rows`. Raises `DatabaseUnavailable`."""

    def work(connection: Connection) -> int:
        newest = select(control_moves.c.at_us, control_moves.c.move_id).order_by(
            control_moves.c.at_us.desc(), control_moves.c.move_id.desc()
        )
        gone = 0
        if (last := connection.execute(newest.offset(most_rows).limit(1)).first()) is not None:
            too_many = (control_moves.c.at_us, control_moves.c.move_id)
            gone += _delete_oldest(connection, _up_to(too_many, (last.at_us, last.move_id)))
        return gone + _delete_oldest(connection, control_moves.c.at_us < round((now_s - KEPT_S) * 1e6))

    return await database.write(work)


def _up_to(
    columns: tuple[ColumnElement[int], ColumnElement[str]], last: tuple[int, str]
) -> ColumnElement[bool]:
    at_us, move_id = columns
    return (at_us < last[0]) | ((at_us == last[0]) & (move_id <= last[1]))


def _delete_oldest(connection: Connection, condition: ColumnElement[bool]) -> int:
    oldest = select(control_moves.c.move_id).where(condition)
    oldest = oldest.order_by(control_moves.c.at_us, control_moves.c.move_id).limit(MAX_PURGED)
    return connection.execute(delete(control_moves).where(control_moves.c.move_id.in_(oldest))).rowcount
