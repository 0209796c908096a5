"""A declaration that says too little fails when it is made, not at the first request."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
import pytest

from tenants.errors import Invalid
from tenants.fields import Field, command_of, fields_of, without_secrets
from tenants.resources.all import RESOURCES
from tenants.resources.query import Filter, Kind, ListQuery, filters_of
from tenants.resources.shown import Form, Shown, page_columns
from tests.support.made_up_noun import ROOMS, Room, RoomSet


def test_a_list_or_an_act_without_a_scope_that_there_is_fails() -> None:
    with pytest.raises(ValueError, match="room: a list or act has no scope"):
        replace(ROOMS, scope="")
    with pytest.raises(ValueError, match="admin:wrte"):
        replace(ROOMS, acts=(replace(ROOMS.acts[0], scope="admin:wrte"),))


def test_a_filter_without_a_declaration_fails() -> None:
    class Careless(ListQuery, frozen=True):
        colour: str | None = None

    with pytest.raises(TypeError, match=r"Careless\.colour has no Filter"):
        replace(ROOMS, query=Careless)


def test_a_filter_has_its_names_help_and_bounds() -> None:
    class Query(ListQuery, frozen=True, rename={"since": "from"}):
        tenant: Annotated[str | None, Filter(kind=Kind.TENANT)] = None
        since: Annotated[str | None, Filter(kind=Kind.SINCE)] = None

    tenant, since = filters_of(Query)
    assert (tenant.filter.help, tenant.filter.label, tenant.filter.most) == ("Name or id.", "Tenant", 64)
    assert (since.field, since.name, since.filter.label) == ("since", "from", "From (UTC)")


def test_values_stand_in_one_column_beside_or_below_each_other() -> None:
    columns = page_columns(
        (
            Shown("at", "At", Form.INSTANT),
            Shown("model", "Model"),
            Shown("tier", "tier", beside=True),
            Shown("note", "Note", on_page=False),
            Shown("count", "Count", Form.NUMBER),
        )
    )
    assert [column.heading for column in columns] == ["At", "Model, tier", ("Count", "number")]
    assert Shown("id", "Id", link="/x/{id}#{part}").href({"id": "a/b", "part": 1}) == "/x/a%2Fb#1"


def test_a_command_is_made_of_what_is_typed() -> None:
    typed = {"name": "attic", "seats": "1,200", "colour": "", "tenant": "acme"}
    assert command_of(RoomSet, typed) == RoomSet(name="attic", seats=1200, tenant="acme")
    for wrong, field in (({"name": "attic"}, "seats"), ({"name": "a", "seats": "many"}, "seats")):
        with pytest.raises(Invalid) as refused:
            command_of(RoomSet, wrong)
        assert refused.value.field == field


def test_fields_of_each_kind_are_read_off_their_annotations() -> None:
    class Command(msgspec.Struct):
        names: Annotated[list[str] | None, Field(option="--name")] = None
        now: bool = False
        for_s: Annotated[float | None, Field(is_duration=True)] = None

    names, now, for_s = fields_of(Command)
    assert (names.kind, names.option, now.is_flag, for_s.kind) == (list, "--name", True, float)
    assert command_of(Command, {"names": "a, b", "now": "yes", "for_s": "1.5"}) == Command(
        ["a", "b"], True, 1.5
    )


def test_a_secret_is_in_no_row() -> None:
    assert "door_code" not in without_secrets(Room("r", "t", "attic", 4, "red", "4711"))


def test_each_resource_has_an_address_of_its_own() -> None:
    paths = [one.path for one in RESOURCES]
    assert len(set(paths)) == len(paths)
    acts = [(act.method, one.path, act.path) for one in RESOURCES for act in one.acts]
    assert len(set(acts)) == len(acts)
