"""A noun that the product does not have, in one file: rooms that tenants have booked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from sqlalchemy import Column, Integer, MetaData, String, Table

from tenants.admin.table_noun import TableNoun
from tenants.fields import Field
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.resource import Document, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.resources.table_acts import reading, removing, setting

COLOURS = ("red", "green")
TEXTS = [Column(name, String(64)) for name in ("tenant_id", "name", "colour", "door_code")]
TABLE = Table(
    "rooms", MetaData(), Column("id", String(64), primary_key=True), *TEXTS, Column("seats", Integer)
)


class RoomSet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Field("What people call it.")]
    seats: Annotated[int, Field("How many sit there.", schema={"minimum": 1})]
    colour: Annotated[str, Field("Of its door.", choices=COLOURS)] = "red"
    door_code: Annotated[str, Field("Opens it.", is_secret=True)] = ""
    tenant: Annotated[str | None, Field("Whose it is (name or id).")] = None


@dataclass(frozen=True)
class Room:
    id: str
    tenant_id: str
    name: str
    seats: int
    colour: str
    door_code: Annotated[str, Field(is_secret=True)]


class RoomQuery(ListQuery, frozen=True):
    colour: Annotated[str | None, Filter(TABLE.c.colour, Kind.CHOICE, choices=COLOURS)] = None


STORED = TableNoun(
    "room", "rooms", TABLE, Room, names=("tenant_id", "name"), order=(TABLE.c.name, TABLE.c.id)
)
MAY: dict[str, Any] = {"scope": "admin:write", "act": Act.CHANGE_PLATFORM}
ROOMS = Resource(
    name="room",
    plural="rooms",
    title="Rooms",
    query=RoomQuery,
    read=reading(STORED),
    order=STORED.order,
    as_json=STORED.as_json,
    find=STORED.find,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="List rooms",
    shown=(Shown("name", "Name"), Shown("seats", "Seats", Form.NUMBER), Shown("colour", "Colour")),
    file=("id", "tenant", "name", "seats", "colour"),
    acts=(
        ResourceAct("room.set", setting(STORED), command=RoomSet, summary="Book a room", status=201, **MAY),
        ResourceAct(
            "room.remove", removing(STORED), method="DELETE", path="/{reference}", summary="Give it up", **MAY
        ),
    ),
    document=Document.of(STORED, RoomSet, ("name",), "room {name}", of_tenants=True, of_platform=False),
)
