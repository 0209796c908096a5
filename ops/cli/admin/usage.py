"""`fairgate usage`: what was charged, and whether its sums are what the ledger says."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import actor, administer
from ops.cli.base import answer, group, opened
from ops.cli.options import OUTPUT, Duration
from ops.reporting import table

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

SHOWN = (
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nanousd",
    "credit_nanousd",
    "gpu_ms",
)
"""Amounts in the table; the JSON has all."""
_NAMES = {"tenant_id": "tenant", "project_id": "project", "key_id": "key_name"}


class _Start(click.ParamType[str]):
    """A date, an instant with a time zone, or how long ago (then a full hour; of whole days a day, UTC)."""

    name = "start"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value).strip()
        if "-" in text or ":" in text:
            return text
        ago_s = Duration().convert(text, param, ctx)
        try:
            at = datetime.now(UTC) - timedelta(seconds=ago_s)
        except OverflowError:
            self.fail(f"{text!r} ago is before the first year", param, ctx)
        whole_s = 86_400 if ago_s % 86_400 == 0 else 3_600
        return datetime.fromtimestamp(at.timestamp() // whole_s * whole_s, UTC).isoformat()


@group()
def usage() -> None:
    """Usage: what was charged to tenants, projects and keys, as the ledger has it.

    \b
      fairgate usage show --by tenant,model
      fairgate usage show --by key --tenant acme --window day --from 7d
      fairgate usage show --by tenant --window month --from 2026-01-01 --to 2026-04-01
      fairgate usage sessions acme
      fairgate usage export --from 2026-01-01 --to 2026-02-01 --output january.csv
      fairgate usage verify
    """


@usage.command()
@click.option("--from", "from_", type=_Start(), help="Begin: a date, an instant, or 24h, 7d ago.  [30d ago]")
@click.option("--to", type=_Start(), help="End, exclusive: the same.  [default: now]")
@click.option(
    "--window",
    type=click.Choice(["total", "hour", "day", "month"]),
    default="total",
    show_default=True,
    help="Sums by this.",
)
@click.option(
    "--by",
    "group_by",
    default="tenant",
    show_default=True,
    metavar="NAMES",
    help="Of tenant, project, key, model, tier, outcome, label:<name>, with commas.",
)
@click.option("--time-zone", default="UTC", show_default=True, help="Whose days and months.")
@click.option("--tenant", help="Only this tenant's (name or id).")
@click.option("--project", help="Only this project's (id, or beside --tenant its name).")
@click.option("--key", help="Only this key's (id or visible prefix).")
@click.option("--model", help="Only of this model.")
@click.option("--tier", help="Only of this tier.")
@click.option("--outcome", help="Only of requests that ended so.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Only with this label.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=100, show_default=True, help="Rows at most.")
@click.option("--cursor", help="Next page of the same question.")
def show(limit: int, cursor: str | None, **asked: Any) -> None:
    """Shows usage by window and groups. What is not in the stored sums yet is added from the ledger.

    \b
    --json answers:
      {"data": [{"start": "2026-01-01T00:00:00+00:00", "end": "2026-01-31T00:00:00+00:00",
       "tenant_id": "ten_…", "tenant": "acme", "ended_requests": 130, "requests": 128,
       "input_tokens": 90210, "cached_tokens": 1200, "output_tokens": 33120, "cost_nanousd": 18957000,
       "credit_nanousd": 0, "gpu_ms": 73120, "waits": 128, "wait_us": 910221, "first_tokens": 127,
       "ttft_us": 4103552}, …], "next_cursor": null, "folded_to": "2026-01-30T12:00:00+00:00",
       "includes_unfolded": true}
    """
    from tenants.admin.lists.usage import UsageAsked

    async def read(admin: Admin) -> dict[str, Any]:
        page = (await admin.usage.read(UsageAsked(**asked), cursor=cursor, limit=limit)).as_json()
        del page["object"]
        return page | {"data": await admin.with_names(page["data"])}

    answered = administer(read)

    def text() -> None:
        rows = answered["data"]
        groups = [name for name in (rows[0] if rows else {}) if _is_group(name)]
        table(
            "windows",
            ("from", "to", *(name.removesuffix("_id") for name in groups), *SHOWN),
            [
                (
                    row["start"][:16],
                    row["end"][:16],
                    *(str(row.get(_NAMES.get(name, name)) or row[name] or "") for name in groups),
                    *(f"{row[name]:,}" for name in SHOWN),
                )
                for row in rows
            ],
        )
        if not answered["includes_unfolded"]:
            click.echo(
                f"Only up to {answered['folded_to'] or 'nothing'}: newer requests are still being added up."
            )
        if answered["next_cursor"]:
            click.echo(f"there are more: repeat this with --cursor {answered['next_cursor']}")

    answer(answered, text)


@usage.command()
@click.option(
    "--format", "form", type=click.Choice(["focus", "csv", "jsonl"]), default="focus", show_default=True
)
@click.option(
    "--window", type=click.Choice(["total", "hour", "day", "month"]), default="day", show_default=True
)
@click.option("--by", "group_by", default="", metavar="NAMES", help="As of `fairgate usage show`.")
@OUTPUT
def export(form: str, output: Path | None, **asked: Any) -> None:
    """Writes usage as a file, all rows of it: its sums are the ledger's, to the nano-dollar.

    \b
      fairgate usage export --from 2026-01-01 --to 2026-02-01 --output january.csv
      fairgate usage export --by label:team --window month        teams as tags
    FOCUS 1.2 is by tenant, project, key, model and tier, with up to three others of --by as tags; csv and
    jsonl are by the same unless --by says else. A window that has ended does not change any more.
    --json answers, with --output:
      {"format": "focus", "output": "january.csv"}
    """
    from tenants.admin.lists.usage import UsageAsked
    from tenants.admin.lists.usage_export import export_usage

    async def write(admin: Admin) -> None:
        texts = await export_usage(admin.transactions, UsageAsked(**asked), form)
        with opened(output) as file:
            async for text in texts:
                file.write(text)

    administer(write)
    if output is not None:
        answer({"format": form, "output": str(output)}, f"written to {output}")


# The question of `show`, of which all rows are written.
_TAKEN = {"limit", "cursor", *(each.name for each in export.params)}
export.params += [each for each in show.params if each.name not in _TAKEN]


def _is_group(name: str) -> bool:
    return name in (*_NAMES, "model", "tier", "outcome") or name.startswith("label:")


@usage.command()
def verify() -> None:
    """Compares every sum with the ledger. Exit code 1 when they differ.

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
            else "usage is what the ledger says"
        )

    answer({"ok": not problems, "problems": problems}, text)
    sys.exit(1 if problems else 0)


@usage.command()
def rebuild() -> None:
    """Makes every sum what the ledger says, while servers run. Where nothing is wrong, nothing changes.

    \b
    --json answers:
      {"corrected": 0}
    """
    corrected = administer(lambda admin: admin.usage.rebuild(actor()))
    answer({"corrected": corrected}, f"{corrected:,} sums corrected")


@usage.command()
@click.argument("tenant")
@click.argument("session", required=False)
@click.option("--limit", type=click.IntRange(1, 1_000), default=100, show_default=True, help="Rows at most.")
def sessions(tenant: str, session: str | None, limit: int) -> None:
    """Lists a tenant's sessions (runs of agents), the one that called last first; or the calls of one.

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
    names = (*(("id", "last_call_at", "calls") if is_list else ("id", "ended_at", "outcome")), *SHOWN[1:6])
    rows = [[row[name] for name in names] for row in shown["data" if is_list else "newest"]]
    answer(shown, lambda: table("sessions" if is_list else "calls", names, rows))
