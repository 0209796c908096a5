"""`fairgate limit`: limits of the platform, of tenants, projects, keys and end users."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import click
import msgspec

from ops.cli.administer import actor, administer, named_list, named_one
from ops.cli.base import answer, group
from ops.cli.live import call, running_server
from ops.cli.options import Number
from ops.cli.resource_options import field_option
from ops.reporting import table
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.limits import LimitView, newest_window
from tenants.errors import Invalid
from tenants.fields import fields_of
from tenants.instants import from_us
from tenants.nouns.checks import instant
from tenants.nouns.limit import LimitOverride, LimitSet, limit_as_json, rate_in_words
from tenants.nouns.limit_checks import limit_columns
from tenants.quota.alerts import EventKind, LimitEvent
from tenants.resources.limits import LIMITS, LimitQuery
from tenants.resources.reading import read_all
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Window


@group()
def limit() -> None:
    """Limits on tokens, cost, requests, rates and concurrency.

    On all tenants together, a tenant, a project, a key or an end user.

    \b
      fairgate limit set --tenant acme --meter total_tokens --window day --amount 1m
      fairgate limit set --tenant acme --meter output_tokens --rate 500 --burst 5000 --tier interactive
      fairgate limit set --tenant acme --meter concurrency --amount 20
      fairgate limit set --tenant acme --meter cost_nanousd --window month --amount 5bn --soft   # $5
      fairgate limit set --tenant acme --each-end-user --meter requests --window day --amount 200
      fairgate limit set --platform --model large --tier batch --meter output_tokens --rate 5000 --burst 50000
      fairgate limit set --tenant acme --tier batch --meter output_tokens --rate 50 --ceiling 400 --burst 500
      fairgate limit set --tenant acme --above 8000 --meter concurrency --amount 2
      fairgate limit override lim_… --amount 2000000 --for 12h --reason "launch day"
      fairgate limit list --tenant acme
      fairgate limit show lim_…
      fairgate limit remove lim_…
    """


EXAMPLE = Limit(
    *("lim_…", "ten_…", SubjectKind.TENANT, "ten_…", Meter.TOTAL_TOKENS, 1_000_000, Window.DAY),
    created_us=1_769_860_800_000_000,
)
SHOWN = json.dumps(limit_as_json(EXAMPLE) | {"tenant": "acme", "subject": "acme"}, ensure_ascii=False)
SET_HELP = f"""Sets a limit, in force in every gateway when this returns.

It replaces the limit of the same subject, meter, shape, tier, model and --above, and keeps what was used. A
new limit starts at zero: it counts running and future requests, not finished ones ("counts_since").

\b
Three shapes: --window with --amount; --rate with --burst; --meter concurrency with --amount.
A hard limit (the default) is never exceeded by a single token; gpu_ms is exact to one step. Units: tokens,
requests, milliseconds of GPU (gpu_ms), nano-dollars (cost_nanousd: 5bn = $5).
--json answers:
{textwrap.indent(textwrap.fill(SHOWN, 100), "  ")}
Exit code 3: set, but a gateway has not confirmed it within 5 seconds; "not_in_force_on" names it.
"""


TWO_OPTIONS = {
    "amount": (
        click.Option(
            ["--amount"],
            type=Number(int, 0),
            help="Size of the window, or the concurrency, in the meter's unit. 0 refuses all.",
        ),
        click.Option(["--burst"], type=Number(int, 1), help="Size of the bucket that --rate refills."),
    ),
    "mode": (
        click.Option(["--soft"], is_flag=True, help="Alert instead of refusing."),
        click.Option(["--shadow"], is_flag=True, help="Only count what it would refuse."),
    ),
}
SET_OPTIONS = [
    option for one in fields_of(LimitSet) for option in TWO_OPTIONS.get(one.name) or (field_option(one),)
]


@contextmanager
def _naming_options(command: type[msgspec.Struct]) -> Iterator[None]:
    """What the command's checks refuse was asked wrongly."""
    try:
        yield
    except Invalid as error:
        options = {one.name: one.option for one in fields_of(command)}
        raise click.UsageError(f"{options.get(error.field, '--' + error.field)}: {error.message}") from None


@limit.command(name="set", params=SET_OPTIONS, help=SET_HELP)
def set_(
    amount: int | None, burst: int | None, soft: bool, shadow: bool, thresholds: tuple[int, ...], **rest: Any
) -> None:
    if soft and shadow:
        raise click.UsageError("--soft and --shadow exclude each other")
    if (rest["rate_per_s"] is None) != (burst is None):
        raise click.UsageError("--rate and --burst belong together: a bucket refills at --rate up to --burst")
    size = amount if burst is None else burst
    if size is None or (burst is not None and amount is not None):
        raise click.UsageError("give --window and --amount, or --rate and --burst")
    mode = LimitMode.SOFT if soft else LimitMode.SHADOW if shadow else LimitMode.HARD
    wanted = LimitSet(amount=size, mode=mode, thresholds=list(thresholds) or None, **rest)
    with _naming_options(LimitSet):
        limit_columns(wanted)
    made, shown = named_one(lambda admin: admin.limits.set(actor(), wanted), limit_as_json)
    since = f"{from_us(made.created_us):%Y-%m-%d %H:%M:%S} UTC"
    answer(
        shown,
        f"limit {made.limit_id} set: {in_words(made)}\n"
        f"it counts from {since}: requests that finished before are not counted",
    )


def _override_options() -> list[click.Parameter]:
    options = [field_option(one) for one in fields_of(LimitOverride)]
    for option in options:
        option.required = False  # with --clear none is given
    clear = click.Option(["--clear"], is_flag=True, help="End the override now.")
    return [click.Argument(["limit_id"]), *options, clear]


@limit.command(params=_override_options())
def override(limit_id: str, clear: bool, **given: Any) -> None:
    """Changes the amount of a limit for a time; then the limit is as it was set.

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
        cleared, shown = named_one(
            lambda admin: admin.limits.clear_override(actor(), limit_id), limit_as_json
        )
        answer(shown, f"limit {limit_id} is as it was set: {in_words(cleared)}")
        return
    if given["amount"] is None or given["reason"] is None:
        raise click.UsageError("an override needs --amount and --reason (or --clear ends one)")
    wanted = LimitOverride(**given)
    if (wanted.until is None) == (wanted.for_s is None):
        raise click.UsageError("say when it ends: --until or --for, one of them")
    if wanted.until is not None:
        with _naming_options(LimitOverride):
            instant("until", wanted.until)
    made, shown = named_one(lambda admin: admin.limits.override(actor(), limit_id, wanted), limit_as_json)
    assert made.override is not None
    ends_at = f"{from_us(made.override.until_us):%Y-%m-%d %H:%M:%S} UTC"
    answer(
        shown,
        f"limit {limit_id} has {wanted.amount} until {ends_at}; then again: {in_words(made)}",
    )


def in_words(limit: Limit) -> str:
    """`1,000,000 total_tokens a day (hard)`."""
    if limit.is_bucket:
        shape = f"{rate_in_words(limit, what=limit.meter.value)}, bursts up to {limit.amount:,}"
    elif limit.window is None:
        shape = f"{limit.amount:,} requests at once"
    elif limit.window is Window.LIFETIME:
        shape = f"{limit.amount:,} {limit.meter.value} altogether"
    else:
        shape = f"{limit.amount:,} {limit.meter.value} a {limit.window.value}"
    tier = f", tier {limit.tier.value}" if limit.tier else ""
    model = f", model {limit.model}" if limit.model else ""
    above = f", above {limit.above_tokens:,} tokens" if limit.above_tokens else ""
    return f"{shape} ({limit.mode.value}{tier}{model}{above})"


def use_in_words(use: dict[str, Any] | None) -> str:
    """`used 1,200, held 64, remaining 736, resets in 12 s, binds first`; empty where it is not known."""
    if use is None:
        return ""
    if "end_users" in use:
        return f"{use['end_users']:,} of {use['most_end_users']:,} end users"
    words = [f"{name} {use[name]:,}" for name in ("used", "held", "remaining")]
    if use["refill_per_s"] is not None:
        words.append(f"refills at {use['refill_per_s']:g} a second now")
    if use["reset_s"]:
        words.append(f"resets in {timedelta(seconds=math.ceil(use['reset_s']))}")
    return ", ".join([*words, *(["binds first"] if use["binds_first"] else [])])


def _in_use(path: str, **query: str | None) -> dict[str, dict[str, Any] | None]:
    """Use by limit id, from the running server; empty without one."""
    server = running_server()
    if server is None:
        return {}
    used: dict[str, dict[str, Any] | None] = {}
    cursor = None
    while True:
        pages = {} if path else {"limit": str(MAX_PAGE), "cursor": cursor}
        page = call(server, "GET", f"/limits{path}", query=query | pages)
        used |= {row["id"]: row["usage"] for row in page.get("data", [page])}
        cursor = page.get("next_cursor")
        if cursor is None:
            return used


def subject_in_words(limit: Limit, names: Mapping[str, Any]) -> str:
    """`all tenants together`, `tenant acme`, `key acme / robot (key_…)`, `end user amy of acme`."""
    if limit.kind is SubjectKind.PLATFORM:
        return "all tenants together"
    tenant = names["tenant"] or limit.tenant_id
    if limit.kind is SubjectKind.END_USER:
        return f"{'each end user' if limit.is_default else f'end user {limit.end_user}'} of {tenant}"
    if limit.kind is SubjectKind.TENANT:
        return f"tenant {tenant}"
    subject = f"{names['subject']} ({limit.subject_id})" if names["subject"] else limit.subject_id
    return f"{limit.kind.value} {tenant} / {subject}"


def override_in_words(shown: LimitView) -> str:
    override = shown.limit.override
    if override is None:
        return ""
    until = f"{from_us(override.until_us):%Y-%m-%d %H:%M} UTC"
    if not shown.is_overridden:
        return f"ended {until}"
    rate = "" if override.rate_per_s is None else f" at {override.rate_per_s:g} a second"
    return f"{override.amount:,}{rate} until {until}: {override.reason}"


def noticed_in_words(events: Sequence[LimitEvent]) -> str:
    words = [
        f"would have refused {event.count:,}"
        if event.key.kind is EventKind.WOULD_DENY
        else f"{event.key.level} % reached"
        for event in newest_window(events)
    ]
    return ", ".join(words)


@limit.command(name="list")
@click.option("--tenant", help="Only this tenant's (name or id).")
@click.option("--end-user", help="Show the use of this end user of its tenant's default.")
def list_(tenant: str | None, end_user: str | None) -> None:
    """Lists limits: how much is used, which one binds first, overrides and alerts.

    Use needs a running server. Soft and shadow limits show what they noticed in their newest window.

    \b
    --json answers a list of what `limit show` answers, with the events of the newest window:
      [{"id": "lim_…", "meter": "total_tokens", "window": "day", "amount": 1000000, "mode": "hard", …}]
    """
    query = LimitQuery(tenant=tenant)
    views, named = named_list(lambda admin: read_all(admin, LIMITS, query), LimitView.as_json)
    in_use = _in_use("", tenant=tenant, end_user=end_user) if views else {}

    def text() -> None:
        if not views and tenant is not None:
            click.echo(f"{tenant} has no limits")
            return
        rows = [
            (
                shown.limit.limit_id,
                subject_in_words(shown.limit, names),
                in_words(shown.limit),
                use_in_words(in_use.get(shown.limit.limit_id)),
                override_in_words(shown),
                noticed_in_words(shown.events),
            )
            for shown, names in zip(views, named, strict=True)
        ]
        table("limits", ("id", "binds", "limit", "use", "override", "noticed"), rows)

    answer([_shown(row, in_use) for row in named], text)


def _shown(named: Mapping[str, Any], in_use: Mapping[str, Any]) -> dict[str, Any]:
    return {**named, "usage": in_use.get(named["id"])}


@limit.command()
@click.argument("limit_id")
@click.option("--end-user", help="Show the use of this end user of a default.")
def show(limit_id: str, end_user: str | None) -> None:
    """Shows one limit: how much is used, thresholds reached, requests it would have refused.

    Use needs a running server.

    \b
    --json answers what `limit set` answers, with:
      {…, "overridden": false, "in_force": {"amount": 1000000, …},
       "usage": {"used": 1200, "held": 64, "remaining": 736, "reset_s": 11.5, "refill_per_s": null,
                 "binds_first": true},
       "events": [{"window_start": "2026-01-31T00:00:00+00:00", "kind": "threshold", "level": 80,
                   "count": 12, "first": "…", "last": "…"}]}
    """
    shown, named = named_one(lambda admin: admin.limits.show(limit_id), LimitView.as_json)
    in_use = _in_use(f"/{limit_id}", end_user=end_user)

    def text() -> None:
        one = shown.limit
        click.echo(f"{one.limit_id}: {in_words(one)}, on {subject_in_words(one, named)}")
        click.echo(use_in_words(in_use.get(limit_id)) or "use: unknown, no server runs here")
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

    answer(_shown(named, in_use), text)


@limit.command()
@click.argument("limit_id")
def remove(limit_id: str) -> None:
    """Removes a limit, with its override.

    \b
    --json answers:
      {"id": "lim_…", "removed": true}
    """
    administer(lambda admin: admin.limits.remove(actor(), limit_id))
    answer({"id": limit_id, "removed": True}, f"limit {limit_id} removed")
