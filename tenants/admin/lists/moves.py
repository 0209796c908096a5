"""List of moves of control loops: filters, order and cursors."""

from __future__ import annotations

from typing import Annotated

import msgspec
from sqlalchemy import Connection
from sqlalchemy.sql import ColumnElement

from tenants.admin import validation
from tenants.admin.cursor import Page, Text, beyond, checked_limit, decode_cursor, page_of
from tenants.admin.lists.scans import between, end_of_scan
from tenants.admin.transaction import AdminActs
from tenants.counts import move_store
from tenants.counts.move_store import MAX_KNOB_CHARACTERS, MAX_MODEL_CHARACTERS, StoredMove
from tenants.storage.tables import control_moves

Instant = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class MoveQuery(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"since": "from", "until": "to"}
):
    """Which moves. None: any."""

    model: str | None = None
    knob: str | None = None
    made: bool | None = None
    """True: those that were made; false: those that were only advised."""
    since: str | None = None
    until: str | None = None


class MoveReads(AdminActs):
    async def read(
        self, query: MoveQuery, *, cursor: str | None = None, limit: int = 100
    ) -> Page[StoredMove]:
        """Moves, newest first. Raises `Invalid`, `DatabaseUnavailable`."""
        filters, most = msgspec.to_builtins(query), checked_limit(limit)
        last = None if cursor is None else decode_cursor("moves", filters, cursor, tuple[Instant, Text])
        order = (control_moves.c.at_us, control_moves.c.move_id)
        filtered = _of_moves(query)
        indexed, others = (
            ([], filtered) if query.knob is query.model is None else (filtered[:1], filtered[1:])
        )
        conditions = indexed + between(control_moves.c.at_us, query.since, query.until)
        if last is not None:
            conditions.append(beyond(order, last, newest_first=True))

        def read(connection: Connection) -> tuple[list[StoredMove], tuple[int | str, ...] | None]:
            end, looked_at = None, list(conditions)
            if others:
                end = end_of_scan(connection, order, conditions)
            if end is not None:
                looked_at.append(~beyond(order, end, newest_first=True))
            return move_store.where(connection, looked_at + others, most + 1), end

        moves, end = await self._transactions.read(read)
        return page_of(moves, most, "moves", filters, lambda row: (row.at_us, row.move_id), scanned_to=end)


def _of_moves(query: MoveQuery) -> list[ColumnElement[bool]]:
    """All but the time, indexed ones first. Raises `Invalid` for a value that no move can have."""
    columns, conditions = control_moves.c, []
    if query.knob is not None:
        conditions.append(columns.knob == validation.plain_text("knob", query.knob, MAX_KNOB_CHARACTERS))
    if query.model is not None:
        conditions.append(columns.model == validation.plain_text("model", query.model, MAX_MODEL_CHARACTERS))
    if query.made is not None:
        conditions.append(columns.is_made.is_(query.made))
    return conditions
