"""`fairgate doctor` on a sound installation with PostgreSQL, and after each thing that may be wrong there."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Connection, update

from migrations import runner
from ops.cli.main import cli
from ops.serving import audit_key
from tenants.audit import store
from tenants.audit.log import AuditLog
from tenants.directory.gateways import GatewayRegistry
from tenants.outbox.figures import note_backup
from tenants.storage.database import Database, open_database
from tenants.storage.tables import gateways
from tests.support.otlp_receiver import otlp_receiver

HOUR_US = 3_600 * 1_000_000
RELEASES = {"new": "0.3.0", "old": "0.2.1", "gone": "0.1.0"}


@dataclass
class Place:
    """An installation, and what `fairgate doctor` is started with."""

    url: str
    home: Path
    rules: Path
    monkeypatch: pytest.MonkeyPatch
    open: ExitStack
    environment: dict[str, str]

    def write(self, *changes: Callable[[Connection], object]) -> None:
        async def run() -> None:
            database = open_database(self.url)
            try:
                for change in changes:
                    await database.write(change)
            finally:
                await database.close()

        asyncio.run(run())

    def findings(self) -> dict[str, dict[str, Any]]:
        arguments = ["doctor", "--json", "--rules", str(self.rules)]
        result = CliRunner(env=self.environment).invoke(cli, arguments, prog_name="fairgate")
        found = {each["check"]: each for each in json.loads(result.stdout)["checks"]}
        assert result.exit_code == (0 if all(each["ok"] for each in found.values()) else 1)
        return found


def act(connection: Connection, ago_us: int) -> None:
    at_us = round(time.time() * 1e6) - ago_us
    store.append(connection, store.LogEntry(at_us, "cli:root", "cli", "tenant.update", "ten_1"))


async def sound(database: Database, home: Path) -> None:
    """A signed audit, and three gateways, of which the oldest is gone."""
    await database.write(lambda connection: act(connection, 30 * HOUR_US))
    own = await audit_key.own(home, AuditLog(database))
    await AuditLog(database, own).make_checkpoint()
    for name, release in RELEASES.items():
        await GatewayRegistry(database).beat(name, "", frozenset())
        values: dict[str, Any] = {"release": release} | ({"heartbeat_us": 0} if name == "gone" else {})
        changed = update(gateways).where(gateways.c.id == name).values(values)
        await database.write(lambda connection, changed=changed: connection.execute(changed))


@pytest.fixture
def place(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    home, rules = tmp_path / "home", tmp_path / "fairgate.rules.yml"
    home.mkdir(mode=0o700)
    (home / "engine-gateway.keys").touch(mode=0o600)

    async def prepare() -> None:
        database = open_database(postgres_url)
        try:
            await sound(database, home)
        finally:
            await database.close()

    asyncio.run(prepare())
    rules.write_text(CliRunner().invoke(cli, ["alerts", "rules"]).stdout)
    with otlp_receiver() as collector, ExitStack() as stack:
        environment = {
            "FAIRGATE_DATA_DIR": str(home),
            "FAIRGATE_DATABASE_URL": postgres_url,
            "FAIRGATE_ENGINE_SERVE": "no",
            "FAIRGATE_GATEWAY_STALE": "300",
            "FAIRGATE_TELEMETRY_OTLP": collector.url,
        }
        yield Place(postgres_url, home, rules, monkeypatch, stack, environment)


def stale_backup(place: Place) -> None:
    place.write(lambda connection: note_backup(connection, round(time.time() * 1e6) - 37 * HOUR_US))


def late_checkpoint(place: Place) -> None:
    place.write(lambda connection: act(connection, HOUR_US))


def readable_secret(place: Place) -> None:
    os.chmod(place.home / "engine-gateway.keys", 0o640)


def clock_off(place: Place) -> None:
    right = time.time
    place.monkeypatch.setattr(time, "time", lambda: right() - 600)


def collector_away(place: Place) -> None:
    """Connections are taken, and nothing answers."""
    silent = place.open.enter_context(socket.create_server(("127.0.0.1", 0)))
    place.environment["FAIRGATE_TELEMETRY_OTLP"] = f"http://127.0.0.1:{silent.getsockname()[1]}"


def rules_out_of_date(place: Place) -> None:
    place.environment["FAIRGATE_GATEWAY_ALERT_MISSES"] = "11"


def migration_behind(place: Place) -> None:
    runner.downgrade(place.url, "-1")


def two_releases_apart(place: Place) -> None:
    fresh = update(gateways).values(heartbeat_us=round(time.time() * 1e6))
    place.write(lambda connection: connection.execute(fresh))


def nothing(place: Place) -> None:
    """It stays sound."""


@pytest.mark.parametrize(
    ("happens", "check", "detail", "advice"),
    [
        (nothing, None, "", ""),
        (stale_backup, "backup", "no backup was taken for 37.0 hours", "fairgate backup"),
        (late_checkpoint, "audit", "row 1 of the audit is not signed since", "fairgate audit checkpoint"),
        (readable_secret, "data directory", "engine-gateway.keys is open to others (mode 640)", "chmod 600"),
        (clock_off, "clock", "differs from the database's by", "synchronise"),
        (collector_away, "collector", "cannot be reached", "telemetry.otlp"),
        (rules_out_of_date, "alert rules", "is not what these settings", "fairgate alerts rules"),
        (migration_behind, "database", "this program needs", "fairgate db upgrade"),
        (two_releases_apart, "releases", "0.1.0, 0.2.1, 0.3.0", "replace the oldest"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_doctor_finds_what_is_wrong_and_nothing_else(
    place: Place, happens: Callable[[Place], None], check: str | None, detail: str, advice: str
) -> None:
    happens(place)
    found = place.findings()
    assert {name for name, each in found.items() if not each["ok"]} == ({check} if check else set()), found
    if check is not None:
        assert detail in found[check]["detail"]
        assert advice in found[check]["advice"]
        assert found[check]["took_s"] < 3
