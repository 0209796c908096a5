"""`fairgate key`: API keys of tenants."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ops.cli.admin.administer import actor, named_list, named_one
from ops.cli.base import answer, group
from ops.cli.options import Duration
from ops.reporting import table
from tenants.admin.commands import KeyChange, KeyCreate, ProjectCreate
from tenants.directory.records import ApiKey
from tenants.types import SCOPES

if TYPE_CHECKING:
    from tenants.admin.admin import Admin


ALLOW_FROM = click.option(
    "--allow-from",
    "allow_from",
    multiple=True,
    metavar="CIDR",
    help="Network or address that it may be used from (repeat).  [default: anywhere]",
)


@group()
def key() -> None:
    """API keys: made for a tenant, shown once, revoked within a second.

    \b
      fairgate key create --tenant acme
      fairgate key create --tenant acme --scope usage:read --expires-in 30d
      fairgate key create --tenant acme --allow-from 10.0.0.0/8 --allow-from 2001:db8::/32
      fairgate key set key_… --allow-from 10.1.0.0/16
      fairgate key list --tenant acme
      fairgate key rotate key_… --grace 1h
      fairgate key revoke key_…
    """


@key.command()
@click.option("--tenant", required=True, help="Whose key it is (name or id).")
@click.option("--project", help="Project of the tenant; made when it is new.  [default: default]")
@click.option("--name", default="", help="A name for people.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(sorted(SCOPES)),
    help="What the key may do (repeat).  [default: inference, quote and usage:read]",
)
@click.option(
    "--expires-in",
    "expires_in_s",
    type=Duration(),
    help="Life time, such as 12h or 30d.  [default: for ever]",
)
@click.option("--model", "models", multiple=True, help="Model it may use (repeat; default: all).")
@ALLOW_FROM
def create(
    name: str, scopes: tuple[str, ...], models: tuple[str, ...], allow_from: tuple[str, ...], **options: Any
) -> None:
    """Creates a key and shows its secret, this once.

    \b
    --json answers:
      {"key": "fg_live_…", "id": "key_…", "tenant_id": "ten_…", "tenant": "acme", "project_id": "prj_…",
       "project": "default", "name": "", "prefix": "fg_live_4kXb…", "scopes": ["inference", "quote",
       "usage:read"], "models": null, "allow_from": ["10.0.0.0/8"], "expires_at": null, …}
    """
    wanted = KeyCreate(
        scopes=list(scopes) or None,
        models=list(models) or None,
        allow_from=list(allow_from) or None,
        **options,
    )

    async def create_in_project(admin: Admin) -> tuple[ApiKey, str]:
        project, tenant = wanted.project, wanted.tenant
        known = {text for each in await admin.list_projects(tenant) for text in (each.name, each.project_id)}
        if project is not None and project not in known:
            await admin.create_project(actor(), ProjectCreate(tenant=tenant, name=project))
        return await admin.create_key(actor(), wanted, name=name)

    (made, secret), shown = named_one(create_in_project, _with_secret)
    answer(
        shown,
        f"{secret}\n\nThis is the only time that the secret is shown. Its id is {made.key_id}.",
    )


@key.command(name="set")
@click.argument("key_id")
@ALLOW_FROM
@click.option("--allow-from-anywhere", is_flag=True, help="It may be used from anywhere again.")
def set_(key_id: str, allow_from: tuple[str, ...], allow_from_anywhere: bool) -> None:
    """Changes where a key may be used from. KEY_ID may be its prefix; rotation keeps the networks.

    \b
    --json answers what `key create` answers, without "key".
    """
    if bool(allow_from) == allow_from_anywhere:
        raise click.UsageError("say what changes: --allow-from CIDR (repeat), or --allow-from-anywhere")
    wanted = KeyChange(allow_from=list(allow_from))
    changed, shown = named_one(lambda admin: admin.update_key(actor(), key_id, wanted), ApiKey.as_json)
    where = ", ".join(map(str, changed.allow_from)) or "anywhere"
    answer(shown, f"key {changed.key_id} may be used from {where}")


@key.command(name="list")
@click.option("--tenant", help="Only this tenant's (name or id).")
def list_(tenant: str | None) -> None:
    """Lists keys, without their secrets.

    \b
    --json answers a list of what `key create` answers, without "key", with "status":
      [{"id": "key_…", "prefix": "fg_live_4kXb…", "status": "active", …}]
    """
    now = datetime.now(UTC)
    found, shown = named_list(
        lambda admin: admin.list_keys(tenant), lambda item: item.as_json() | {"status": item.status(now)}
    )
    rows = [
        (
            item.key_id,
            item.name,
            named["tenant"],
            named["project"],
            item.prefix,
            named["status"],
            ", ".join(sorted(item.scopes)),
            "" if item.expires_at is None else item.expires_at.strftime("%Y-%m-%d %H:%M"),
            ", ".join(map(str, item.allow_from)),
        )
        for item, named in zip(found, shown, strict=True)
    ]
    columns = ("id", "name", "tenant", "project", "prefix", "status", "scopes", "expires", "from")
    answer(shown, lambda: table("keys", columns, rows))


@key.command()
@click.argument("key_id")
def revoke(key_id: str) -> None:
    """Revokes a key, at once and for good. KEY_ID may be its prefix.

    \b
    --json answers what `key create` answers, without "key", with "revoked_at".
    """
    revoked, shown = named_one(lambda admin: admin.revoke_key(actor(), key_id), ApiKey.as_json)
    answer(shown, f"key {revoked.key_id} of {shown['tenant']} revoked")


@key.command()
@click.argument("key_id")
@click.option(
    "--grace",
    type=Duration(),
    default="1h",
    show_default=True,
    help="How long the old secret goes on working.",
)
def rotate(key_id: str, grace: float) -> None:
    """Gives a key a new secret, shown once; the old one works for the grace time.

    \b
    --json answers what `key create` answers.
    """
    (_, secret), shown = named_one(
        lambda admin: admin.rotate_key(actor(), key_id, grace_s=grace), _with_secret
    )
    answer(
        shown,
        f"{secret}\n\nThe secret is shown this once. The old one works for {grace:g} s more.",
    )


def _with_secret(made: tuple[ApiKey, str]) -> dict[str, Any]:
    """A key, with its secret."""
    key, secret = made
    return {"key": secret} | key.as_json()
