"""`fairgate tenant`: tenants, their weights and tiers."""

from __future__ import annotations

from typing import Any

import click

from ops.cli.admin.limit import in_words, subject_in_words
from ops.cli.administer import NOW, actor, administer, named_one
from ops.cli.base import answer, group
from ops.reporting import table
from tenants.admin.commands import TenantChange, TenantCreate
from tenants.admin.tenants import TenantView
from tenants.admin.validation import ALL_TIERS
from tenants.types import OnLowBudget, Tier

LOW_BUDGET = click.Choice([choice.value for choice in OnLowBudget])
TIERS = click.Choice([tier.value for tier in Tier])
RESERVED_TIERS = click.Choice([*(tier.value for tier in Tier), ALL_TIERS])


@group()
def tenant() -> None:
    """Tenants: who shares the engines, and with which weight.

    \b
      fairgate tenant create acme --weight 2 --tier interactive
      fairgate tenant list
      fairgate tenant show acme
      fairgate tenant set acme --on-low-budget truncate
      fairgate tenant set acme --reserve 2000 --reserve-tier interactive
      fairgate tenant set acme --label team=search --label team=ads
      fairgate tenant suspend acme --now
      fairgate tenant resume acme
    """


@tenant.command()
@click.argument("name")
@click.option(
    "--weight", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Its share."
)
@click.option(
    "--tier", type=TIERS, default=Tier.STANDARD.value, show_default=True, help="Tier of its requests."
)
@click.option(
    "--may-use",
    "tiers",
    type=TIERS,
    multiple=True,
    help="Tiers it may ask for (repeat).  [default: --tier and the ones served after it]",
)
@click.option(
    "--on-low-budget",
    type=LOW_BUDGET,
    default=OnLowBudget.REFUSE.value,
    show_default=True,
    help="When a budget no longer covers a request's worst case: refuse it, or cut its answer.",
)
@click.option(
    "--reserve",
    "reserved_tokens_per_s",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Cost tokens (input + 2 x output) per second that it gets before everybody else; 0: none.",
)
@click.option(
    "--reserve-tier",
    "reserved_tier",
    type=RESERVED_TIERS,
    default=ALL_TIERS,
    show_default=True,
    help="Tier whose requests --reserve is for.",
)
def create(tiers: tuple[str, ...], **options: Any) -> None:
    """Creates a tenant.

    \b
    Two tenants that both wait in the same tier are served in proportion to their weights.
    --json answers:
      {"id": "ten_…", "name": "acme", "status": "active", "weight": 2.0, "reserved_tokens_per_s": 0.0,
       "reserved_tier": null, "on_low_budget": "refuse", "default_tier": "interactive",
       "tiers": ["interactive", "standard", "batch"], "models": null, "labels": {},
       "created_at": "2026-01-31T12:00:00+00:00"}
    """
    wanted = TenantCreate(tiers=list(tiers) or None, **options)
    made = administer(lambda admin: admin.tenants.create(actor(), wanted))
    answer(made.as_json(), f"tenant {made.name} created ({made.tenant_id})")


@tenant.command(name="set")
@click.argument("name")
@click.option("--weight", type=click.FloatRange(0, min_open=True), help="Its share.")
@click.option("--tier", type=TIERS, help="Tier of its requests.")
@click.option("--may-use", "tiers", type=TIERS, multiple=True, help="Tiers it may ask for (repeat).")
@click.option("--model", "models", multiple=True, help="Models it may use (repeat).")
@click.option(
    "--on-low-budget",
    type=LOW_BUDGET,
    help="When a budget no longer covers a request's worst case: refuse it, or cut its answer.",
)
@click.option(
    "--reserve",
    "reserved_tokens_per_s",
    type=click.FloatRange(0),
    help="Cost tokens (input + 2 x output) per second that it gets before everybody else; 0: none.",
)
@click.option(
    "--reserve-tier", "reserved_tier", type=RESERVED_TIERS, help="Tier whose requests they are for."
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="Value that a label of its requests may have (repeat: together they are all that it may have).",
)
@click.option("--drop-label", "dropped", multiple=True, metavar="KEY", help="Label that is no more (repeat).")
def set_(
    name: str,
    tiers: tuple[str, ...],
    models: tuple[str, ...],
    labels: tuple[str, ...],
    dropped: tuple[str, ...],
    **options: Any,
) -> None:
    """Changes a tenant; what is not named stays. NAME may be its id.

    \b
    A new --tier without --may-use allows it and the ones served after it.
    A label is a key of a request's `metadata` that goes to the ledger with it.
    --json answers what `tenant create` answers.
    """
    wanted = TenantChange(
        tiers=list(tiers) or None,
        models=list(models) or None,
        labels=_labels(labels, dropped) or None,
        **options,
    )
    if wanted == TenantChange():
        raise click.UsageError(
            "say what changes: --weight, --tier, --may-use, --model, --reserve, --reserve-tier,"
            " --on-low-budget, --label or --drop-label"
        )
    changed = administer(lambda admin: admin.tenants.update(actor(), name, wanted))
    answer(changed.as_json(), f"tenant {changed.name} changed")


def _labels(given: tuple[str, ...], dropped: tuple[str, ...]) -> dict[str, list[str]]:
    """Raises `UsageError`."""
    labels: dict[str, list[str]] = {key: [] for key in dropped}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or key in dropped:
            raise click.UsageError(f"--label takes KEY=VALUE, of a label that is not dropped; not {text!r}")
        labels.setdefault(key, []).append(value)
    return labels


@tenant.command(name="list")
def list_() -> None:
    """Lists all tenants.

    \b
    --json answers a list of what `tenant create` answers:
      [{"id": "ten_…", "name": "acme", "status": "active", "weight": 2.0, …}]
    """
    tenants = administer(lambda admin: admin.tenants.all())
    rows = [
        (item.name, item.status, f"{item.weight:g}", item.default_tier.value, item.tenant_id)
        for item in tenants
    ]
    answer(
        [item.as_json() for item in tenants],
        lambda: table("tenants", ("name", "status", "weight", "tier", "id"), rows),
    )


@tenant.command()
@click.argument("name")
def show(name: str) -> None:
    """Shows one tenant with its projects, keys and limits. NAME may be its id.

    \b
    --json answers:
      {"id": "ten_…", "name": "acme", …, "projects": […], "keys": […], "limits": […], "has_limits": true}
    """
    shown, named = named_one(lambda admin: admin.tenants.show(name), TenantView.as_json)

    def text() -> None:
        one = shown.tenant
        click.echo(f"{one.name} ({one.tenant_id}), {one.status}")
        click.echo(f"weight {one.weight:g}, tier {one.default_tier.value}, may use {', '.join(one.tiers)}")
        if one.reserved_tokens_per_s:
            of = f", for {one.reserved_tier.value} requests" if one.reserved_tier else ""
            click.echo(f"reserved: {one.reserved_tokens_per_s:g} cost tokens per second{of}")
        click.echo(f"on a low budget: {one.on_low_budget.value}")
        for key, values in one.labels.items():
            click.echo(f"label {key}: {', '.join(values)}")
        projects = [(item.name, item.status, item.project_id) for item in shown.projects]
        table("projects", ("name", "status", "id"), projects)
        keys = [
            (key["id"], key["name"], key["project"], key["prefix"], ", ".join(key["scopes"]))
            for key in named["keys"]
        ]
        table("keys", ("id", "name", "project", "prefix", "scopes"), keys)
        if shown.limits:
            limits = [
                (item.limit_id, subject_in_words(item, names), in_words(item))
                for item, names in zip(shown.limits, named["limits"], strict=True)
            ]
            table("limits", ("id", "binds", "limit"), limits)
        else:
            click.echo("no limits: nothing bounds what it may use")

    answer(named, text)


@tenant.command()
@click.argument("name")
@NOW
def suspend(name: str, now: bool) -> None:
    """Suspends a tenant, in every gateway when this returns: its keys open nothing any more, and what waits
    ends, refunded. What runs goes on to its end, or with --now ends as well.

    \b
    --json answers what `tenant create` answers, with "status": "suspended" and, with --now, "now": true.
    Exit code 3: a gateway has not confirmed it ("not_in_force_on").
    """
    suspended = administer(lambda admin: admin.tenants.suspend(actor(), name, now=now))
    answer(suspended.as_json(), f"tenant {suspended.name} suspended")


@tenant.command()
@click.argument("name")
def resume(name: str) -> None:
    """Undoes a suspension.

    \b
    --json answers what `tenant create` answers, with "status": "active".
    """
    resumed = administer(lambda admin: admin.tenants.resume(actor(), name))
    answer(resumed.as_json(), f"tenant {resumed.name} is active again")
