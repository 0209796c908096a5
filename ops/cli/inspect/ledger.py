"""`fairgate ledger`: verification of ledger and counters, and what is given back."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from gateway.console.formats import exact_dollars
from ops.cli.administer import actor, administer
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
      fairgate ledger adjust req_01j9… --reason "the answer had 300 tokens"
    """


@ledger.command()
def verify() -> None:
    """Checks every row, and every limit's counter against the rows. Exit code 1 if they differ.

    \b
    Counters live in the running server (or in Redis): without either only the rows are checked, and
    "counters" says so.
    --json answers:
      {"ok": true, "counters": "server", "reserves": 120, "settles": 118, "open_requests": 2, "limits": 3,
       "in_doubt_tokens": 0, "in_doubt": [], "problems": []}
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
        if report["in_doubt_tokens"]:
            click.echo(f"{report['in_doubt_tokens']} tokens in doubt; `fairgate ledger adjust` gives back:")
            for request_id in report["in_doubt"]:
                click.echo(f"  {request_id}")
        for problem in report["problems"]:
            click.echo(f"  {problem}")
        click.echo("the books agree" if report["ok"] else "the books do NOT agree")

    answer(report, text)
    sys.exit(0 if report["ok"] else 1)


@ledger.command()
@click.argument("request_id")
def show(request_id: str) -> None:
    """Shows every row of one request: reserved, topped up, charged, and on whose report.

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
                f"{'$' + exact_dollars(row['cost_nanousd']):>14}  {row['gateway_id']}  {row['outcome']}"
            )
            labels = {f"label {key}": value for key, value in row["labels"].items()}
            for name, value in (labels | row["detail"]).items():
                click.echo(f"    {name}: {value}")

    answer({"request_id": request_id, "rows": rows}, text)


@ledger.command()
@click.argument("request_id")
@click.option("--reason", required=True, help="Why; kept with the row and in the audit.")
def adjust(request_id: str, reason: str) -> None:
    """Gives tokens of a request in doubt back to its limits.

    \b
      fairgate ledger verify                  says which requests are in doubt
      fairgate ledger adjust req_01j9… --reason "the answer had 300 tokens"

    Where gateway and engine died together, limits count all that a request held, so that none is exceeded;
    billed is what was last reported. This gives the difference back, once. The bill stays as it is.

    \b
    --json answers:
      {"request_id": "req_01j9…", "input_tokens": 0, "output_tokens": 900, "cost_nanousd": 270000,
       "requests": 0, "is_new": true}
    """
    from gateway.domain.ids import request_id_of

    request_id = request_id_of(request_id)
    server = running_server()
    if server is not None:
        given = call(server, "POST", "/ledger/adjust", body={"request_id": request_id, "reason": reason})
    else:
        given = _adjust(request_id, reason)
    tokens = f"{given['input_tokens']} input and {given['output_tokens']} output tokens"
    answer(given, f"{tokens} {'are' if given['is_new'] else 'had been'} given back to the limits")


def _adjust(request_id: str, reason: str) -> dict[str, Any]:
    """Without a server; the counters in Redis follow, where there is one."""
    from tenants.admin.admin import Admin
    from tenants.admin.commands import LedgerAdjust
    from tenants.quota.store import QuotaStoreUnavailable

    redis_url = settings_now().redis_url

    async def act(admin: Admin) -> dict[str, Any]:
        wanted = LedgerAdjust(request_id=request_id, reason=reason)
        if not redis_url:
            return (await admin.ledger.adjust(actor(), wanted, None)).as_json()
        from tenants.quota.redis import RedisQuotaStore

        store = RedisQuotaStore(redis_url)
        try:
            await store.ping()
            return (await admin.ledger.adjust(actor(), wanted, store)).as_json()
        finally:
            await store.close()

    try:
        return administer(act)
    except QuotaStoreUnavailable as error:
        raise Failure(f"Redis: {error}") from None


async def _find(settings: Settings, request_id: str) -> list[dict[str, Any]]:
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
    return [row.as_json() for row in rows]


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
