"""`fairgate brake`: bounds what a tier may hold, for a while."""

from __future__ import annotations

import click

from ops.cli.administer import actor, administer
from ops.cli.base import Command, answer
from ops.cli.options import Duration
from ops.reporting import table
from tenants.admin.commands import BrakeEnd, BrakeSet
from tenants.admin.platform.brakes import Brake


@click.command(cls=Command)
@click.option("--tier", help="What is braked: standard or batch.")
@click.option("--share", type=float, help="Of places, KV cache and step tokens, above 0 and at most 1.")
@click.option("--for", "for_s", type=Duration(), help="Until it ends by itself: 30m, at most 24h.")
@click.option("--reason", default="", help="Why; shown with it and in the audit.")
@click.option("--clear", is_flag=True, help="End the tier's brake now.")
def brake(tier: str | None, share: float | None, for_s: float | None, reason: str, clear: bool) -> None:
    """Brakes a tier: it holds at most a share of every engine, in every gateway, until its time is over.

    \b
      fairgate brake --tier batch --share 0.1 --for 30m --reason "night job"
      fairgate brake                                 those that hold now
      fairgate brake --tier batch --clear            ends it before its time

    The share is a hard cap on the tier's places (at least one), its KV cache and its tokens in each step,
    also where the rest stays idle. What runs already runs on. Setting it again replaces it. Running servers
    follow within a second, and write its end to the audit.

    \b
    --json answers, in a list where none is set or cleared:
      {"tier": "batch", "share": 0.1, "until": "2026-01-31T18:30:00+00:00", "by": "cli:root",
       "reason": "night job"}
    """
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
        raise click.UsageError("give --tier and --share, such as --tier batch --share 0.1 --for 30m")
    if for_s is None:
        raise click.UsageError("a brake needs an end: give --for, such as --for 30m (at most 24h)")
    wanted = BrakeSet(tier=tier, share=share, for_s=for_s, reason=reason)
    made = administer(lambda admin: admin.brakes.set(actor(), wanted))
    until = made.as_json()["until"]
    answer(made.as_json(), f"{made.tier.value} holds at most {made.share:g} of every engine until {until}")


def _show(brakes: list[Brake]) -> None:
    rows = [row.as_json() for row in brakes]
    columns = ("tier", "share", "until", "by", "reason")
    table("brakes", columns, [tuple(str(row[name]) for name in columns) for row in rows])
