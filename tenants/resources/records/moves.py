"""Moves of the control loops, made or advised, each with its reason."""

from __future__ import annotations

from typing import Annotated

from sqlalchemy import Connection

from tenants.admin.cursor import PAGES, SortKey
from tenants.counts import move_store
from tenants.counts.move_store import KEPT_S, MAX_KNOB_CHARACTERS, MAX_MODEL_CHARACTERS, StoredMove
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import TIMES, read_rows
from tenants.resources.resource import PageRequest, Resource
from tenants.resources.shown import Form, Shown
from tenants.storage.tables import control_moves

_moves = control_moves.c
ORDER = (_moves.at_us, _moves.move_id)


class MoveQuery(ListQuery, frozen=True, rename=TIMES):
    """Which moves. None: any."""

    model: Annotated[str | None, Filter(_moves.model, help="Of this model.", most=MAX_MODEL_CHARACTERS)] = (
        None
    )
    knob: Annotated[
        str | None,
        Filter(_moves.knob, help="Of this knob, such as batch_cap.", most=MAX_KNOB_CHARACTERS),
    ] = None
    made: Annotated[
        bool | None,
        Filter(
            _moves.is_made,
            Kind.FLAG,
            option="--made/--advised",
            help="Only moves that were made, or only advised ones.",
        ),
    ] = None
    since: Annotated[str | None, Filter(_moves.at_us, Kind.SINCE, option="--last", usual="24h")] = None
    until: Annotated[str | None, Filter(_moves.at_us, Kind.UNTIL)] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[StoredMove], SortKey | None]:
    return read_rows(connection, request, move_store.where, ORDER, ("knob", "model"))


MOVES = Resource(
    name="policy",
    plural="policy/moves",
    title="Moves",
    query=MoveQuery,
    read=_read,
    order=ORDER,
    as_json=StoredMove.as_json,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="List the moves of the control loops, made or advised, each with its reason",
    description="The newest first, of all gateways of the database; `knobs`: where all knobs of the model"
    " really stood after the move. Filters: `model`, `knob`, `made` (false: only advised), `from` and `to`"
    f" (instants with a time zone; the second is exclusive). {PAGES} They are kept for {KEPT_S // 86_400}"
    " days; the last second is not in yet.",
    has_page=False,
    shown=(
        Shown("at", "At", Form.INSTANT),
        Shown("model", "Model"),
        Shown("is_made", "Made"),
        Shown("knob", "Knob"),
        Shown("before", "From", Form.NUMBER),
        Shown("after", "To", Form.NUMBER),
        Shown("reason", "Why"),
        Shown("gateway_id", "By"),
    ),
    command="moves",
    command_help="""Lists the moves of the control loops, made or advised, newest first, with reasons.

    From the database: of all gateways, for 90 days. The setting gateway.control says what a loop may change;
    `fairgate status` shows what it has changed.

    \b
      fairgate policy moves --since 2h
      fairgate policy moves --knob batch_cap --made

    \b
    --json answers:
      {"data": [{"id": "mov_…", "object": "control_move", "at": "2026-01-31T12:00:00+00:00",
       "gateway_id": "gw_…", "model": "m", "knob": "batch_cap", "before": 1.0, "after": 0.875,
       "reason": "KV nearly full (0.95)", "is_made": true, "mode": "acting",
       "knobs": {"batch_cap": 0.875, …}}, …], "next_cursor": null}
    """,
)
