"""A noun in one file, handed in with the product's own, has routes, commands, pages, a section."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from litestar import Litestar
from sqlalchemy import create_engine

from gateway.app import handlers
from gateway.routes import openapi
from ops.cli.main import cli
from tenants.resources.all import RESOURCES
from tests.support.console import Browser
from tests.support.gateway_app import gateway_and_app
from tests.support.made_up_noun import ROOMS, TABLE

NOUNS = (*RESOURCES, ROOMS)
CODE = "4711-secret"


@asynccontextmanager
async def site(url: str, data_dir: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Litestar]]:
    TABLE.create(create_engine(url))
    async with gateway_and_app(url, data_dir, resources=NOUNS) as client_and_app:
        yield client_and_app


def test_it_is_at_most_eighty_lines() -> None:
    assert len(Path("tests/support/made_up_noun.py").read_text().splitlines()) <= 80


def test_its_routes_are_in_the_openapi_document() -> None:
    app = Litestar(route_handlers=handlers(NOUNS), openapi_config=openapi.openapi_config())
    document = openapi.document(app, app.openapi_schema.to_schema())
    assert {path: {*document["paths"][path]} for path in ("/admin/v1/rooms", "/admin/v1/rooms/{room}")} == {
        "/admin/v1/rooms": {"get", "post"},
        "/admin/v1/rooms/{room}": {"get", "delete"},
    }
    parameters = {one["name"]: one for one in document["paths"]["/admin/v1/rooms"]["get"]["parameters"]}
    assert parameters.keys() == {"colour", "cursor", "limit"}
    assert parameters["colour"]["schema"]["enum"] == ["red", "green"]
    assert document["components"]["schemas"]["RoomSet"]["properties"]["seats"]["minimum"] == 1


async def test_its_acts_rows_file_and_audit(sqlite_url: str, tmp_path: Path) -> None:
    async with site(sqlite_url, tmp_path / "data") as (client, _):
        wanted = {"tenant": "t1", "name": "attic", "seats": 4, "door_code": CODE}
        made = await client.post("/admin/v1/rooms", json=wanted)
        assert made.status_code == 201, made.text
        room = made.json()
        await client.post("/admin/v1/rooms", json=wanted | {"name": "cellar", "colour": "green"})

        async def asked(path: str) -> Any:
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
            assert CODE not in answer.text
            return answer.json()

        assert [row["name"] for row in (await asked("/admin/v1/rooms?colour=green"))["data"]] == ["cellar"]
        assert (await asked(f"/admin/v1/rooms/{room['id']}")) == room
        wrong = await client.get("/admin/v1/rooms?colour=blue")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "colour")

        document = (await asked("/admin/v1/config"))["config"]
        rooms = next(one for one in document["tenants"] if one["name"] == "t1")["rooms"]
        assert rooms == [
            {"name": "attic", "seats": 4, "colour": "red"},
            {"name": "cellar", "seats": 4, "colour": "green"},
        ]
        rooms[0] |= {"seats": 6}
        rooms[1] = {"name": "cellar", "state": "absent"}
        plan = (await client.post("/admin/v1/config/plan", json=document)).json()
        assert [(step["act"], step["subject"]) for step in plan["steps"]] == [
            ("room.set", "t1: room attic"),
            ("room.remove", "t1: room cellar"),
        ]
        assert (await client.post("/admin/v1/config/apply", json=document)).status_code == 200
        assert [(row["name"], row["seats"]) for row in (await asked("/admin/v1/rooms"))["data"]] == [
            ("attic", 6)
        ]

        conflict = await client.request(
            "DELETE", f"/admin/v1/rooms/{room['id']}", headers={"if-match": '"0123456789abcdef"'}
        )
        assert conflict.status_code == 412
        assert (await client.delete(f"/admin/v1/rooms/{room['id']}")).status_code == 200
        rows = (await asked("/admin/v1/audit?order=oldest"))["data"]
        audit = [row for row in rows if row["action"].startswith("room.")]
        acts = ["room.set", "room.set", "room.set", "room.remove", "room.remove"]
        assert [row["action"] for row in audit] == acts
        assert (audit[0]["before"], audit[0]["after"]["seats"]) == (None, 4)


async def test_its_pages(sqlite_url: str, tmp_path: Path) -> None:
    async with site(sqlite_url, tmp_path / "data") as (client, app), Browser(app) as browser:
        person = await client.post("/admin/v1/people", json={"name": "ada", "role": "owner"})
        await browser.redeem(person.json()["link"].partition("token=")[2])
        assert 'href="/console/rooms"' in (await browser.get("/console")).text, "the menu has it"
        wrong = await browser.send("/console/rooms/set", name="attic", seats="many", tenant="t1")
        assert (wrong.status_code, "is not a number" in wrong.text) == (422, True)
        typed = {"name": "<script>", "seats": "4", "colour": "green", "tenant": "t1", "door_code": CODE}
        made = await browser.send("/console/rooms/set", **typed)
        assert made.headers["location"].startswith("/console/rooms?done=set")
        page = (await browser.get("/console/rooms?colour=green")).text
        assert "&lt;script&gt;" in page
        assert CODE not in page
        assert "<script>,4,green" in (await browser.get("/console/rooms.csv")).text
        (room,) = (await client.get("/admin/v1/rooms")).json()["data"]
        remove = f"/console/rooms/{room['id']}/remove"
        await client.post("/admin/v1/rooms", json={**typed, "seats": 5})
        late = await browser.http.post(
            remove, data={"form_token": await browser.token(remove), "etag": "0" * 16}
        )
        assert (late.status_code, "changed after you opened this page" in late.text) == (412, True)
        tag = re.findall(r'name="etag" value="([^"]+)"', (await browser.get(remove)).text)[-1]
        assert (await browser.send(remove, etag=tag)).status_code == 303
        assert "There is none" in (await browser.get("/console/rooms")).text


def test_its_commands(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TABLE.create(create_engine(sqlite_url))
    monkeypatch.setattr(cli, "resources", NOUNS)

    def run(*words: str) -> str:
        common = ("--database-url", sqlite_url, "--data-dir", str(tmp_path))
        result = CliRunner().invoke(cli, [*words, *common], prog_name="fairgate")
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "room" in CliRunner().invoke(cli, ["--help"]).stdout
    run("tenant", "create", "acme")
    room = json.loads(run("room", "set", "--name", "attic", "--seats", "4", "--tenant", "acme", "--json"))
    assert "attic" in run("room", "list", "--colour", "red")
    assert "rooms:" in run("export")
    run("room", "remove", room["id"])
    assert "none" in run("room", "list")
