"""Brakes in force, as pages of the console; the API and the command line have a route and a command."""

from __future__ import annotations

from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.commands import BrakeEnd, BrakeSet
from tenants.admin.cursor import SortKey
from tenants.admin.platform.brakes import Brake, stored_brakes
from tenants.errors import NotFound
from tenants.people.roles import Act
from tenants.resources.query import ListQuery
from tenants.resources.resource import ActCall, ActDone, PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Shown


class BrakeQuery(ListQuery, frozen=True):
    """All of them."""


def _in_force(connection: Connection, now_us: int) -> list[Brake]:
    return [brake for brake in stored_brakes(connection) if not brake.is_over(now_us)]


def _read(connection: Connection, request: PageRequest) -> tuple[list[Brake], SortKey | None]:
    return ([] if request.after else _in_force(connection, request.now_us)), None


def _find(connection: Connection, reference: str, tenant: str | None, now_us: int) -> Brake:
    for brake in _in_force(connection, now_us):
        if brake.tier.value == reference:
            return brake
    raise NotFound("brake", reference[:80])


async def _set(admin: Admin, call: ActCall) -> ActDone:
    made = (await admin.brakes.set(call.actor, call.command)).as_json()
    return ActDone(made, made)


async def _end(admin: Admin, call: ActCall) -> ActDone:
    ended = await admin.brakes.end(call.actor, BrakeEnd(tier=call.reference), if_match=call.if_match)
    return ActDone(ended.as_json(), None)


BRAKES = Resource(
    name="brake",
    plural="policy/brake",
    title="Brakes",
    query=BrakeQuery,
    read=_read,
    order=lambda query: (str,),
    key_of=lambda brake: (brake.tier.value,),
    as_json=lambda brake: {"id": brake.tier.value} | brake.as_json(),
    stored=Brake.as_json,
    find=_find,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="The brakes in force",
    menu="policy",
    empty=("No brake is in force", "A brake limits what a tier may use of every engine, for a while."),
    shown=(
        Shown("tier", "Tier"),
        Shown("share", "Share of each engine", Form.SHARE),
        Shown("until", "Until", Form.INSTANT),
        Shown("by", "By"),
        Shown("reason", "Why"),
    ),
    acts=(
        ResourceAct(
            "brake.set",
            _set,
            command=BrakeSet,
            scope="admin:write",
            act=Act.CHANGE_PLATFORM,
            summary="Brake a tier",
            confirm=(
                "The tier uses at most this share of every engine, even while the rest is idle.",
                "Requests that are running keep running; waiting ones wait longer. None is lost.",
                "The brake ends at its time, and replaces the tier's earlier one.",
                "The interactive tier cannot be braked. To slow a single tenant, set a limit of requests at a"
                " time on its page.",
            ),
            done="The brake is set. All gateways follow within a second.",
            changes_rows=True,
        ),
        ResourceAct(
            "brake.end",
            _end,
            method="DELETE",
            path="/{reference}",
            scope="admin:write",
            act=Act.CHANGE_PLATFORM,
            summary="Release the brake",
            confirm=("The tier gets its full share again, within a second.",),
            done="The brake is released.",
        ),
    ),
)
