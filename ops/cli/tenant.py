"""`fairgate tenant`: who shares the engines?"""

from __future__ import annotations

import click

from ops.cli.administer import actor, administer
from ops.cli.base import answer, group, table
from ops.cli.limit import in_words
from tenants.types import Tier

TIERS = click.Choice([tier.value for tier in Tier])


@group()
def tenant() -> None:
    """Tenants: who shares the engines, and with which weight.

    \b
      fairgate tenant create acme --weight 2 --tier interactive
      fairgate tenant list
      fairgate tenant show acme
      fairgate tenant suspend acme
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
def create(name: str, weight: float, tier: str, tiers: tuple[str, ...]) -> None:
    """Creates a tenant.

    \b
    Two tenants that both wait in the same tier are served in proportion to their weights.
    --json answers:
      {"id": "ten_…", "name": "acme", "status": "active", "weight": 2.0, "default_tier": "interactive",
       "tiers": ["interactive", "standard", "batch"], "models": null,
       "created_at": "2026-01-31T12:00:00+00:00"}
    """
    allowed = [Tier(item) for item in tiers] or None
    made = administer(
        lambda admin: admin.create_tenant(actor(), name, weight=weight, tier=Tier(tier), tiers=allowed)
    )
    answer(made.as_json(), f"tenant {made.name} created ({made.tenant_id})")


@tenant.command(name="list")
def list_() -> None:
    """Lists all tenants.

    \b
    --json answers a list of what `tenant create` answers:
      [{"id": "ten_…", "name": "acme", "status": "active", "weight": 2.0, …}]
    """
    found = administer(lambda admin: admin.list_tenants())
    rows = [
        (item.name, item.status, f"{item.weight:g}", item.default_tier.value, item.tenant_id)
        for item in found
    ]
    answer(
        [item.as_json() for item in found],
        lambda: table("tenants", ("name", "status", "weight", "tier", "id"), rows),
    )


@tenant.command()
@click.argument("name")
def show(name: str) -> None:
    """Shows one tenant with its projects, keys and limits. NAME may be its id.

    \b
    --json answers:
      {"id": "ten_…", "name": "acme", …, "projects": […], "keys": […], "limits": […]}
    """
    shown = administer(lambda admin: admin.show_tenant(name))

    def text() -> None:
        one = shown.tenant
        click.echo(f"{one.name} ({one.tenant_id}), {one.status}")
        click.echo(f"weight {one.weight:g}, tier {one.default_tier.value}, may use {', '.join(one.tiers)}")
        projects = [(item.name, item.status, item.project_id) for item in shown.projects]
        table("projects", ("name", "status", "id"), projects)
        keys = [(item.key_id, item.prefix, ", ".join(sorted(item.scopes))) for item in shown.keys]
        table("keys", ("id", "prefix", "scopes"), keys)
        table("limits", ("id", "limit"), [(item.limit_id, in_words(item)) for item in shown.limits])

    answer(shown.as_json(), text)


@tenant.command()
@click.argument("name")
def suspend(name: str) -> None:
    """Suspends a tenant: its keys open nothing any more. Requests that run go on to their end.

    \b
    --json answers what `tenant create` answers, with "status": "suspended".
    """
    suspended = administer(lambda admin: admin.suspend_tenant(actor(), name))
    answer(suspended.as_json(), f"tenant {suspended.name} suspended")
