"""`fairgate tenant`: tenants, their weights and tiers."""

from __future__ import annotations

import click

from ops.cli.admin.limit import in_words, subject_in_words
from ops.cli.administer import named_one
from ops.cli.base import answer
from ops.cli.resource_commands import groups
from ops.reporting import table
from tenants.admin.tenants import TenantView
from tenants.resources.tenants import TENANTS

tenant = groups([TENANTS])["tenant"]


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
        called = f", {one.display_name}" if one.display_name else ""
        click.echo(f"{one.name} ({one.tenant_id}){called}, {one.status}")
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
            click.echo("no limits")

    answer(named, text)
