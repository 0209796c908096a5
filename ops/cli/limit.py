"""`fairgate limit`: who may use how much?"""

from __future__ import annotations

import click

from ops.cli.administer import actor, administer
from ops.cli.base import answer, group, table
from tenants.records import limit_as_json
from tenants.types import Limit, Meter, Mode, Tier, Window


@group()
def limit() -> None:
    """Limits on a tenant, a project or a key: budgets per window, rates, concurrency.

    \b
      fairgate limit set --tenant acme --meter total_tokens --window day --amount 1000000
      fairgate limit set --tenant acme --meter output_tokens --rate 500 --burst 5000 --tier interactive
      fairgate limit set --tenant acme --meter concurrency --amount 20
      fairgate limit set --tenant acme --meter cost_nanousd --window month --amount 5000000000 --soft
      fairgate limit list --tenant acme
      fairgate limit remove lim_…
    """


@limit.command(name="set")
@click.option("--tenant", required=True, help="Whom it binds (name or id).")
@click.option("--project", help="Only this project of the tenant.")
@click.option("--key", "key_id", help="Only this key (id) of the tenant.")
@click.option("--tier", type=click.Choice([tier.value for tier in Tier]), help="Only requests in this tier.")
@click.option(
    "--meter", type=click.Choice([meter.value for meter in Meter]), required=True, help="What is counted."
)
@click.option(
    "--window", type=click.Choice([window.value for window in Window]), help="Calendar window of the amount."
)
@click.option(
    "--amount",
    type=click.IntRange(min=0),
    help="Size of the window, or the concurrency, in the meter's unit.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Token bucket instead of a window: it refills at so much a second,",
)
@click.option("--burst", type=click.IntRange(min=1), help="up to so much.")
@click.option("--time-zone", default="UTC", show_default=True, help="Where the window's days begin.")
@click.option("--soft", is_flag=True, help="Alert instead of refusing.")
@click.option("--shadow", is_flag=True, help="Only count.")
def set_(
    tenant: str,
    project: str | None,
    key_id: str | None,
    tier: str | None,
    meter: str,
    window: str | None,
    amount: int | None,
    rate: float | None,
    burst: int | None,
    time_zone: str,
    soft: bool,
    shadow: bool,
) -> None:
    """Sets a limit; the same subject, meter, shape and tier are replaced.

    \b
    Three shapes: --window with --amount; --rate with --burst; --meter concurrency with --amount.
    A hard limit (the default) is never exceeded by a single token.
    --json answers:
      {"id": "lim_…", "tenant_id": "ten_…", "kind": "tenant", "subject_id": "ten_…", "meter": "total_tokens",
       "window": "day", "time_zone": "UTC", "amount": 1000000, "rate_per_s": null, "mode": "hard",
       "tier": null}
    """
    if soft and shadow:
        raise click.UsageError("--soft and --shadow exclude each other")
    if project and key_id:
        raise click.UsageError("--project and --key exclude each other: a limit binds one subject")
    if (rate is None) != (burst is None):
        raise click.UsageError("--rate and --burst belong together: a bucket refills at --rate up to --burst")
    if rate is not None and (window or amount is not None):
        raise click.UsageError("--rate and --burst make a bucket: give no --window and no --amount with them")
    if rate is None and amount is None:
        raise click.UsageError("give --window and --amount, or --rate and --burst")
    is_concurrency = meter == Meter.CONCURRENCY.value
    if is_concurrency and (window or rate is not None):
        raise click.UsageError("--meter concurrency takes --amount only")
    if rate is None and window is None and not is_concurrency:
        raise click.UsageError("--amount needs a --window (minute, hour, day, month or lifetime)")
    size = burst if rate is not None else amount
    assert size is not None
    made = administer(
        lambda admin: admin.set_limit(
            actor(),
            tenant,
            project=project,
            key=key_id,
            meter=Meter(meter),
            amount=size,
            window=Window(window) if window else None,
            rate_per_s=rate,
            time_zone=time_zone,
            mode=Mode.SOFT if soft else Mode.SHADOW if shadow else Mode.HARD,
            tier=Tier(tier) if tier else None,
        )
    )
    answer(limit_as_json(made), f"limit {made.limit_id} set: {in_words(made)}")


def in_words(limit: Limit) -> str:
    """`1,000,000 total_tokens a day (hard)`."""
    if limit.is_bucket:
        shape = f"{limit.rate_per_s:g} {limit.meter.value} a second, bursts up to {limit.amount:,}"
    elif limit.window is None:
        shape = f"{limit.amount:,} requests at once"
    elif limit.window is Window.LIFETIME:
        shape = f"{limit.amount:,} {limit.meter.value} altogether"
    else:
        shape = f"{limit.amount:,} {limit.meter.value} a {limit.window.value}"
    tier = f", tier {limit.tier.value}" if limit.tier else ""
    return f"{shape} ({limit.mode.value}{tier})"


@limit.command(name="list")
@click.option("--tenant", help="Only this tenant's (name or id).")
def list_(tenant: str | None) -> None:
    """Lists limits.

    \b
    --json answers a list of what `limit set` answers:
      [{"id": "lim_…", "meter": "total_tokens", "window": "day", "amount": 1000000, "mode": "hard", …}]
    """
    found = administer(lambda admin: admin.list_limits(tenant))
    rows = [(item.limit_id, item.kind.value, item.subject_id, in_words(item)) for item in found]
    answer(
        [limit_as_json(item) for item in found],
        lambda: table("limits", ("id", "binds", "subject", "limit"), rows),
    )


@limit.command()
@click.argument("limit_id")
def remove(limit_id: str) -> None:
    """Removes a limit.

    \b
    --json answers:
      {"id": "lim_…", "removed": true}
    """
    administer(lambda admin: admin.remove_limit(actor(), limit_id))
    answer({"id": limit_id, "removed": True}, f"limit {limit_id} removed")
