"""`fairgate limit`: limits of tenants, projects and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ops.cli.admin.administer import actor, administer, named_list, named_one
from ops.cli.base import answer, group
from ops.cli.options import Duration
from ops.reporting import table
from tenants.admin import validation
from tenants.admin.commands import LimitOverride, LimitSet
from tenants.admin.limits import LimitView, newest_window
from tenants.directory.records import from_us, limit_as_json
from tenants.errors import Invalid
from tenants.quota.alerts import EventKind, LimitEvent
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Tier, Window


@group()
def limit() -> None:
    """Limits on a tenant, a project or a key: budgets per window, rates, concurrency.

    \b
      fairgate limit set --tenant acme --meter total_tokens --window day --amount 1000000
      fairgate limit set --tenant acme --meter output_tokens --rate 500 --burst 5000 --tier interactive
      fairgate limit set --tenant acme --meter concurrency --amount 20
      fairgate limit set --tenant acme --meter cost_nanousd --window month --amount 5000000000 --soft
      fairgate limit override lim_… --amount 2000000 --for 12h --reason "launch day"
      fairgate limit list --tenant acme
      fairgate limit show lim_…
      fairgate limit remove lim_…
    """


@limit.command(name="set")
@click.option("--tenant", required=True, help="Whom it binds (name or id).")
@click.option("--project", help="Only this project of the tenant.")
@click.option("--key", help="Only this key (id) of the tenant.")
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
    help="Size of the window, or the concurrency, in the meter's unit. 0 admits nothing.",
)
@click.option(
    "--rate",
    "rate_per_s",
    type=click.FloatRange(0, min_open=True),
    help="Token bucket instead of a window: it refills at so much a second,",
)
@click.option("--burst", type=click.IntRange(min=1), help="up to so much.")
@click.option("--time-zone", default="UTC", show_default=True, help="Where the window's days begin.")
@click.option("--soft", is_flag=True, help="Alert instead of refusing.")
@click.option("--shadow", is_flag=True, help="Only count what it would have refused.")
@click.option(
    "--threshold",
    "thresholds",
    type=click.IntRange(1, validation.MAX_THRESHOLD),
    multiple=True,
    help="Where a --soft limit alerts, in per cent of the amount (repeat).  [default: 80 and 100]",
)
def set_(
    amount: int | None, burst: int | None, soft: bool, shadow: bool, thresholds: tuple[int, ...], **rest: Any
) -> None:
    """Sets a limit; the same subject, meter, shape and tier are replaced, and what was used stays used.

    \b
    Three shapes: --window with --amount; --rate with --burst; --meter concurrency with --amount.
    A hard limit (the default) is never exceeded by a single token; gpu_ms is exact to one step.
    --json answers:
      {"id": "lim_…", "tenant_id": "ten_…", "tenant": "acme", "kind": "tenant", "subject_id": "ten_…",
       "subject": "acme", "meter": "total_tokens", "window": "day", "time_zone": "UTC",
       "amount": 1000000, "rate_per_s": null, "mode": "hard", "tier": null, "thresholds": [],
       "override": null}
    """
    if soft and shadow:
        raise click.UsageError("--soft and --shadow exclude each other")
    if thresholds and not soft:
        raise click.UsageError("--threshold belongs to --soft: other limits do not alert")
    if rest["project"] and rest["key"]:
        raise click.UsageError("--project and --key exclude each other: a limit binds one subject")
    rate, window = rest["rate_per_s"], rest["window"]
    if (rate is None) != (burst is None):
        raise click.UsageError("--rate and --burst belong together: a bucket refills at --rate up to --burst")
    if rate is not None and (window or amount is not None):
        raise click.UsageError("--rate and --burst make a bucket: give no --window and no --amount with them")
    if rate is None and amount is None:
        raise click.UsageError("give --window and --amount, or --rate and --burst")
    is_concurrency = rest["meter"] == Meter.CONCURRENCY.value
    if is_concurrency and (window or rate is not None):
        raise click.UsageError("--meter concurrency takes --amount only")
    if rate is None and window is None and not is_concurrency:
        raise click.UsageError("--amount needs a --window (minute, hour, day, month or lifetime)")
    size = burst if rate is not None else amount
    assert size is not None
    mode = LimitMode.SOFT if soft else LimitMode.SHADOW if shadow else LimitMode.HARD
    wanted = LimitSet(amount=size, mode=mode, thresholds=list(thresholds) or None, **rest)
    made, shown = named_one(lambda admin: admin.set_limit(actor(), wanted), limit_as_json)
    answer(shown, f"limit {made.limit_id} set: {in_words(made)}")


@limit.command()
@click.argument("limit_id")
@click.option(
    "--amount",
    type=click.IntRange(min=0),
    help="The window's size, the bucket's burst or the concurrency meanwhile.",
)
@click.option(
    "--rate-per-s",
    type=click.FloatRange(0, min_open=True),
    help="A bucket's rate meanwhile.  [default: its own]",
)
@click.option("--until", metavar="INSTANT", help="Its end, such as 2026-01-31T18:00:00+01:00,")
@click.option("--for", "for_s", type=Duration(), help="or how long, such as 2h or 3d.")
@click.option("--reason", help="Why, for those who find it later.")
@click.option("--clear", is_flag=True, help="End the override now.")
def override(limit_id: str, clear: bool, **given: Any) -> None:
    """Puts another amount in force for a time; then the limit is by itself as it was set.

    \b
      fairgate limit override lim_… --amount 2000000 --for 12h --reason "launch day"
      fairgate limit override lim_… --clear
    --json answers what `limit set` answers, with the override:
      {"id": "lim_…", "amount": 1000000, …, "override": {"amount": 2000000, "rate_per_s": null,
       "until": "2026-01-31T18:00:00+00:00", "reason": "launch day"}}
    """
    if clear:
        if any(value is not None for value in given.values()):
            raise click.UsageError("--clear takes no other option")
        cleared, shown = named_one(lambda admin: admin.clear_override(actor(), limit_id), limit_as_json)
        answer(shown, f"limit {limit_id} is as it was set: {in_words(cleared)}")
        return
    if given["amount"] is None or given["reason"] is None:
        raise click.UsageError("an override needs --amount and --reason (or --clear ends one)")
    wanted = LimitOverride(**given)
    if (wanted.until is None) == (wanted.for_s is None):
        raise click.UsageError("say when it ends: --until or --for, one of them")
    try:
        if wanted.until is not None:
            validation.instant("--until", wanted.until)
    except Invalid as error:
        raise click.UsageError(str(error)) from None
    made, shown = named_one(lambda admin: admin.override_limit(actor(), limit_id, wanted), limit_as_json)
    assert made.override is not None
    ends_at = f"{from_us(made.override.until_us):%Y-%m-%d %H:%M:%S} UTC"
    answer(
        shown,
        f"limit {limit_id} has {wanted.amount} until {ends_at}; then again: {in_words(made)}",
    )


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


def subject_in_words(limit: Limit, names: Mapping[str, Any]) -> str:
    """`acme`, or of a part of a tenant `acme / robot (key_…)`; ids where there are no names."""
    tenant = names["tenant"] or limit.tenant_id
    if limit.kind is SubjectKind.TENANT:
        return str(tenant)
    subject = f"{names['subject']} ({limit.subject_id})" if names["subject"] else limit.subject_id
    return f"{tenant} / {subject}"


def override_in_words(shown: LimitView) -> str:
    """`2,000,000 until 2026-01-31 18:00 UTC: launch day`; empty where there is none."""
    override = shown.limit.override
    if override is None:
        return ""
    until = f"{from_us(override.until_us):%Y-%m-%d %H:%M} UTC"
    if not shown.is_overridden:
        return f"ended {until}"
    rate = "" if override.rate_per_s is None else f" at {override.rate_per_s:g} a second"
    return f"{override.amount:,}{rate} until {until}: {override.reason}"


def noticed_in_words(events: Sequence[LimitEvent]) -> str:
    """`80 % reached, 100 % reached`, or `would have refused 12`, of the newest window."""
    words = [
        f"would have refused {event.count:,}"
        if event.key.kind is EventKind.WOULD_DENY
        else f"{event.key.level} % reached"
        for event in newest_window(events)
    ]
    return ", ".join(words)


@limit.command(name="list")
@click.option("--tenant", help="Only this tenant's (name or id).")
def list_(tenant: str | None) -> None:
    """Lists limits, what overrides them now, and what soft and shadow ones noticed in their newest window.

    \b
    --json answers a list of what `limit show` answers, with the events of the newest window:
      [{"id": "lim_…", "meter": "total_tokens", "window": "day", "amount": 1000000, "mode": "hard", …}]
    """
    found, named = named_list(lambda admin: admin.view_limits(tenant), LimitView.as_json)

    def text() -> None:
        if not found and tenant is not None:
            click.echo(f"{tenant} has no limits: nothing bounds what it may use")
            return
        rows = [
            (
                shown.limit.limit_id,
                shown.limit.kind.value,
                subject_in_words(shown.limit, names),
                in_words(shown.limit),
                override_in_words(shown),
                noticed_in_words(shown.events),
            )
            for shown, names in zip(found, named, strict=True)
        ]
        table("limits", ("id", "binds", "subject", "limit", "override", "noticed"), rows)

    answer(named, text)


@limit.command()
@click.argument("limit_id")
def show(limit_id: str) -> None:
    """Shows one limit with everything it noticed: thresholds reached, requests it would have refused.

    \b
    --json answers what `limit set` answers, with:
      {…, "overridden": false, "in_force": {"amount": 1000000, "rate_per_s": null},
       "events": [{"window_start": "2026-01-31T00:00:00+00:00", "kind": "threshold", "level": 80,
                   "count": 12, "first": "…", "last": "…"}]}
    """
    shown, named = named_one(lambda admin: admin.show_limit(limit_id), LimitView.as_json)

    def text() -> None:
        one = shown.limit
        click.echo(f"{one.limit_id}: {in_words(one)}, on {one.kind.value} {subject_in_words(one, named)}")
        if one.override is not None:
            click.echo(f"override: {override_in_words(shown)}")
        if one.thresholds:
            click.echo(f"alerts at {', '.join(f'{level} %' for level in one.thresholds)}")
        rows = [
            (
                f"{from_us(event.key.window_start_s * 1_000_000):%Y-%m-%d %H:%M}"
                if event.key.window_start_s
                else "",
                event.key.kind.value,
                f"{event.key.level} %" if event.key.level else "",
                event.count,
                f"{event.first:%Y-%m-%d %H:%M:%S}",
                f"{event.last:%Y-%m-%d %H:%M:%S}",
            )
            for event in shown.events
        ]
        table("noticed", ("window from (UTC)", "what", "level", "requests", "first", "last"), rows)

    answer(named, text)


@limit.command()
@click.argument("limit_id")
def remove(limit_id: str) -> None:
    """Removes a limit, with its override.

    \b
    --json answers:
      {"id": "lim_…", "removed": true}
    """
    administer(lambda admin: admin.remove_limit(actor(), limit_id))
    answer({"id": limit_id, "removed": True}, f"limit {limit_id} removed")
