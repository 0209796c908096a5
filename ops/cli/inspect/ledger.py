"""`fairgate ledger`: verification of ledger and counters."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Failure, answer, group, settings_now
from ops.cli.live import call, running_server

if TYPE_CHECKING:
    from ops.settings.settings import Settings

VERIFY_S = 120.0


@group()
def ledger() -> None:
    """The ledger: what was reserved, charged and refunded.

    \b
      fairgate ledger verify
      fairgate ledger show req_01j9…
    """


@ledger.command()
def verify() -> None:
    """Checks every row, and every limit's counter against the rows. Exit code 1 when they disagree.

    \b
    Counters live in the running server (or in Redis): without either only the rows are checked, and
    "counters" says so.
    --json answers:
      {"ok": true, "counters": "server", "reserves": 120, "settles": 118, "open_requests": 2, "limits": 3,
       "problems": []}
    """
    settings = settings_now()
    server = running_server()
    if server is not None:
        report = {"counters": "server"} | call(server, "POST", "/ledger/verify", timeout_s=VERIFY_S)
    else:
        report = asyncio.run(_verify(settings))

    def text() -> None:
        against = "not compared: no server runs" if report["counters"] == "none" else report["counters"]
        click.echo(
            f"{report['reserves']} reserved, {report['settles']} settled, {report['open_requests']} open; "
            f"{report['limits']} limits (counters: {against})"
        )
        for problem in report["problems"]:
            click.echo(f"  {problem}")
        click.echo("the books agree" if report["ok"] else "the books do NOT agree")

    answer(report, text)
    sys.exit(0 if report["ok"] else 1)


@ledger.command()
@click.argument("request_id")
def show(request_id: str) -> None:
    """Every row of one request: what was reserved, topped up and charged, and on whose word.

    \b
    --json answers:
      {"request_id": "req_01j9…", "rows": [{"kind": "reserve", "number": 0, "at": "2026-01-01T12:00:00+00:00",
       "gateway_id": "gw_1", "input_tokens": 10, "output_tokens": 64, "cost_nanousd": 39900, "requests": 1,
       "gpu_ms": 0, "outcome": "", "labels": {"team": "search"}, "detail": {…}}, …]}
    """
    settings = settings_now()
    from gateway.domain.ids import request_id_of

    request_id = request_id_of(request_id)
    rows = asyncio.run(_find(settings, request_id))
    if not rows:
        raise Failure(f"the ledger has no request {request_id!r}")

    def text() -> None:
        for row in rows:
            kind = f"{row['kind']} {row['number']}" if row["number"] else row["kind"]
            click.echo(
                f"{row['at']}  {kind:<10} {row['input_tokens']:>8} in {row['output_tokens']:>8} out "
                f"{row['cost_nanousd']:>12} nano-dollars  {row['gateway_id']}  {row['outcome']}"
            )
            labels = {f"label {key}": value for key, value in row["labels"].items()}
            for name, value in (labels | row["detail"]).items():
                click.echo(f"    {name}: {value}")

    answer({"request_id": request_id, "rows": rows}, text)


async def _find(settings: Settings, request_id: str) -> list[dict[str, Any]]:
    from msgspec import structs

    from tenants.errors import TenancyError
    from tenants.ledger.ledger import Ledger
    from tenants.storage.database import open_database

    _require_database(settings)
    try:
        database = open_database(settings.resolved_database_url)
        try:
            rows = await Ledger(database).find(request_id)
        finally:
            await database.close()
    except TenancyError as error:
        raise Failure(str(error)) from None
    return [
        {
            "kind": row.kind,
            "number": row.number,
            "at": row.at.isoformat(),
            "gateway_id": row.gateway_id,
            "tier": row.tier,
            "model": row.model,
            **structs.asdict(row.amounts),
            "outcome": row.outcome,
            "labels": dict(row.labels),
            "detail": dict(row.detail),
        }
        for row in rows
    ]


def _require_database(settings: Settings) -> None:
    if not settings.database_url and not (settings.data_dir / "fairgate.db").exists():
        raise Failure(f"no database in {settings.data_dir}: name the right --data-dir")


async def _verify(settings: Settings) -> dict[str, Any]:
    from tenants.errors import TenancyError
    from tenants.ledger.verify import verify_ledger
    from tenants.quota.store import QuotaStoreUnavailable
    from tenants.storage.database import open_database

    _require_database(settings)
    try:
        database = open_database(settings.resolved_database_url)
        try:
            if not settings.redis_url:
                report = await verify_ledger(database, None)
                return {"counters": "none"} | report.as_json()
            from tenants.quota.redis import RedisQuotaStore

            store = RedisQuotaStore(settings.redis_url)
            try:
                report = await verify_ledger(database, store)
            finally:
                await store.close()
            return {"counters": "redis"} | report.as_json()
        finally:
            await database.close()
    except (TenancyError, QuotaStoreUnavailable) as error:
        raise Failure(str(error)) from None
