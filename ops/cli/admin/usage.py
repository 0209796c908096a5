"""`fairgate usage`: what was charged, and whether its sums are what the ledger says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import actor, administer
from ops.cli.base import answer, group, opened
from ops.cli.options import OUTPUT, Number
from ops.cli.resource_commands import again, cells, options_of
from ops.reporting import table
from tenants.resources.reading import query_of
from tenants.resources.records.usage import UsageAsked, UsageFile, shown_usage
from tenants.resources.records.usage_export import export_usage
from tenants.resources.shown import Form, Shown

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

TOKENS = ("input_tokens", "cached_tokens", "output_tokens")
SHOWN = (
    *(Shown(name, name.replace("_", " "), Form.NUMBER) for name in ("requests", *TOKENS)),
    Shown("cost_nanousd", "cost", Form.MONEY),
    Shown("credit_nanousd", "credit", Form.MONEY),
    Shown("gpu_ms", "GPU ms", Form.NUMBER),
)
"""Amounts in the table, money in dollars; the JSON has all, money in nano-dollars."""
_NAMES = {"tenant_id": "tenant", "project_id": "project", "key_id": "key_name"}


@group()
def usage() -> None:
    """Usage and cost by tenant, project, key and model.

    \b
      fairgate usage show --by tenant,model
      fairgate usage show --by key --tenant acme --window day --since 7d
      fairgate usage show --by tenant --window month --since 2026-01-01 --until 2026-04-01
      fairgate usage sessions acme
      fairgate usage export --since 2026-01-01 --until 2026-02-01 --output january.csv
      fairgate usage verify
    """


@usage.command()
def show(limit: int, cursor: str | None, **given: Any) -> None:
    """Shows usage by window and groups, the largest cost first.

    Money is in dollars here, and in nano-dollars in JSON.

    \b
    --json answers:
      {"data": [{"start": "2026-01-01T00:00:00+00:00", "end": "2026-01-31T00:00:00+00:00",
       "tenant_id": "ten_…", "tenant": "acme", "ended_requests": 130, "requests": 128,
       "input_tokens": 90210, "cached_tokens": 1200, "output_tokens": 33120, "cost_nanousd": 18957000,
       "credit_nanousd": 0, "gpu_ms": 73120, "waits": 128, "wait_us": 910221, "first_tokens": 127,
       "ttft_us": 4103552}, …], "next_cursor": null, "folded_to": "2026-01-30T12:00:00+00:00",
       "includes_unfolded": true}
    """
    asked = query_of(UsageAsked, given)
    answered = administer(lambda admin: shown_usage(admin, asked, cursor, limit))
    del answered["object"]

    def text() -> None:
        rows = sorted(
            answered["data"], key=lambda row: (row["start"], -row["cost_nanousd"], -row["requests"])
        )
        first = rows[0] if rows else {}
        groups = [name for name in first if _is_group(name)]
        if "project_id" in first and "tenant_id" not in first:
            groups.insert(0, "tenant")
        table(
            "windows",
            ("from", "to", *(name.removesuffix("_id") for name in groups), *(one.label for one in SHOWN)),
            [
                (
                    row["start"][:16],
                    row["end"][:16],
                    *(str(row.get(_NAMES.get(name, name)) or row[name] or "") for name in groups),
                    *cells(row, SHOWN),
                )
                for row in rows
            ],
        )
        if not answered["includes_unfolded"]:
            click.echo(
                f"Only up to {answered['folded_to'] or 'nothing'}: newer requests are still being added."
            )
        if answered["next_cursor"]:
            click.echo(f"more: {again()} --cursor {answered['next_cursor']}")

    answer(answered, text)


@usage.command()
@OUTPUT
def export(output: Path | None, **given: Any) -> None:
    """Writes usage as a file, exact to the nano-dollar.

    \b
      fairgate usage export --since 2026-01-01 --until 2026-02-01 --output january.csv
      fairgate usage export --by label:team --window month        teams as tags
    FOCUS 1.2 groups by tenant, project, key, model and tier, with up to three others of --by as tags; csv and
    jsonl group by the same unless --by is given. Rows of a window that has ended do not change.
    --json answers, with --output:
      {"format": "focus", "output": "january.csv"}
    """
    asked = query_of(UsageFile, given)

    async def write(admin: Admin) -> None:
        texts = await export_usage(admin, asked)
        with opened(output) as file:
            async for text in texts:
                file.write(text)

    administer(write)
    if output is not None:
        answer({"format": asked.format, "output": str(output)}, f"written to {output}")


show.params[:0] = options_of(UsageAsked, 100)
export.params[:0] = options_of(UsageFile, 0)


def _is_group(name: str) -> bool:
    return name in (*_NAMES, "model", "tier", "outcome") or name.startswith("label:")


@usage.command()
def verify() -> None:
    """Compares every sum with the ledger. Exit code 1 if they differ.

    \b
    --json answers:
      {"ok": true, "problems": []}
    """
    problems = administer(lambda admin: admin.usage.verify())

    def text() -> None:
        for problem in problems:
            click.echo(f"  {problem}")
        click.echo(
            "usage differs from the ledger: `fairgate usage rebuild` corrects it"
            if problems
            else "usage equals the ledger"
        )

    answer({"ok": not problems, "problems": problems}, text)
    sys.exit(1 if problems else 0)


@usage.command()
def rebuild() -> None:
    """Corrects every sum from the ledger, while servers run.

    \b
    --json answers:
      {"corrected": 0}
    """
    corrected = administer(lambda admin: admin.usage.rebuild(actor()))
    answer({"corrected": corrected}, f"{corrected:,} sums corrected")


@usage.command()
@click.argument("tenant")
@click.argument("session", required=False)
@click.option("--limit", type=Number(int, 1, 1_000), default=100, show_default=True, help="Rows at most.")
def sessions(tenant: str, session: str | None, limit: int) -> None:
    """Lists a tenant's sessions (runs of agents), latest first; or the calls of one.

    \b
    --json answers:
      {"object": "list", "data": [{"id": "019c2f…", "object": "session",
       "first_call_at": "2026-01-31T12:00:00+00:00", "last_call_at": "2026-01-31T12:09:10+00:00",
       "calls": 12, "input_tokens": 90210, "cached_tokens": 1200, "output_tokens": 3312,
       "cost_nanousd": 1895700, "credit_nanousd": 0, "wait_us": 910221}, …], "has_more": false}
    Of a SESSION the same of it alone, with `by` (its sums by model and outcome) and `newest` (its calls).
    """
    shown = administer(lambda admin: admin.sessions.read(tenant, session, limit=limit))
    is_list = session is None
    names = ("id", "last_call_at", "calls") if is_list else ("id", "ended_at", "outcome")
    columns = [*(Shown(name, name.replace("_", " ")) for name in names), *SHOWN[1:6]]
    rows = [cells(row, columns) for row in shown["data" if is_list else "newest"]]
    labels = [one.label for one in columns]
    answer(shown, lambda: table("sessions" if is_list else "calls", labels, rows))
