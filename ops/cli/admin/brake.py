"""`fairgate brake`: limits a tier to a share of every engine for a while."""

from __future__ import annotations

import shlex

import click

from ops.cli.administer import actor, administer
from ops.cli.base import Command, answer
from ops.cli.options import Duration, Number
from ops.reporting import table
from tenants.admin.commands import BrakeEnd, BrakeSet
from tenants.admin.platform.brakes import Brake


@click.command(cls=Command)
@click.option("--tier", help="Tier to brake: standard or batch.")
@click.option(
    "--share",
    type=Number(float, hundred=1),
    help="Most that it may use of places, KV cache and step tokens: 0.1 or 10%.",
)
@click.option("--for", "for_s", type=Duration(), help="How long: 30m, at most 24h.")
@click.option("--reason", default="", help="Why; shown with the brake and in the audit.")
@click.option("--clear", is_flag=True, help="End the tier's brake now.")
@click.option("--tenant", hidden=True)
def brake(
    tier: str | None, share: float | None, for_s: float | None, reason: str, clear: bool, tenant: str | None
) -> None:
    """Limits a tier to a share of every engine for a while.

    \b
      fairgate brake --tier batch --share 10% --for 30m --reason "night job"
      fairgate brake                                 list the brakes in force
      fairgate brake --tier batch --clear            end it now

    The share is a hard cap on the tier's places (at least one), its KV cache and its tokens in each step,
    even where the rest stays idle. Running requests continue. Setting it again replaces it. All gateways
    follow within a second; its end is written to the audit. To slow one tenant, set a limit:

    \b
      fairgate limit set --tenant acme --meter concurrency --amount 2

    \b
    --json answers, in a list where none is set or cleared:
      {"tier": "batch", "share": 0.1, "until": "2026-01-31T18:30:00+00:00", "by": "cli:root",
       "reason": "night job"}
    """
    if tenant is not None:
        raise click.UsageError(
            "A brake holds a tier; to slow one tenant:"
            f" fairgate limit set --tenant {shlex.quote(tenant)} --meter concurrency --amount 2"
        )
    if clear:
        if tier is None or share is not None or for_s is not None:
            raise click.UsageError("--clear takes --tier and neither --share nor --for")
        ended = administer(lambda admin: admin.brakes.end(actor(), BrakeEnd(tier=tier)))
        answer(ended.as_json(), f"the brake on {ended.tier.value} has ended")
        return
    if tier is None and share is None and for_s is None:
        brakes = administer(lambda admin: admin.brakes.all())
        answer([row.as_json() for row in brakes], lambda: _show(brakes))
        return
    if tier is None or share is None:
        raise click.UsageError("give --tier and --share, such as --tier batch --share 10% --for 30m")
    if for_s is None:
        raise click.UsageError("a brake needs an end: give --for, such as --for 30m (at most 24h)")
    wanted = BrakeSet(tier=tier, share=share, for_s=for_s, reason=reason)
    made = administer(lambda admin: admin.brakes.set(actor(), wanted))
    until = made.as_json()["until"]
    answer(
        made.as_json(),
        f"{made.tier.value} may use at most {made.share * 100:g} % of every engine until {until}",
    )


def _show(brakes: list[Brake]) -> None:
    rows = [row.as_json() for row in brakes]
    columns = ("tier", "share", "until", "by", "reason")
    table("brakes", columns, [tuple(str(row[name]) for name in columns) for row in rows])
