"""`fairgate key`: API keys of tenants."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import NOW, actor, named_list, named_one
from ops.cli.base import answer, group
from ops.cli.options import Duration
from ops.reporting import table
from tenants.admin.commands import KeyChange, KeyCreate, ProjectCreate
from tenants.directory.records import ApiKey, tier_names
from tenants.types import SCOPES, Tier

if TYPE_CHECKING:
    from tenants.admin.admin import Admin


ALLOW_FROM = click.option(
    "--allow-from",
    "allow_from",
    multiple=True,
    metavar="CIDR",
    help="Network or address that it may be used from (repeat).  [default: anywhere]",
)

SCOPE: dict[str, Any] = {"multiple": True, "type": click.Choice(sorted(SCOPES))}
TIERS = [tier.value for tier in Tier]
OF_TENANT, NEVER = "tenant", "never"


@group()
def key() -> None:
    """API keys: made for a tenant, shown once, revoked within a second.

    \b
      fairgate key create --tenant acme
      fairgate key create --tenant acme --scope usage:read --expires-in 30d
      fairgate key create --tenant acme --allow-from 10.0.0.0/8 --allow-from 2001:db8::/32
      fairgate key set key_… --allow-from 10.1.0.0/16 --name robot --default-tier batch
      fairgate key set key_… --scope inference --tier batch --expires 2027-01-31T18:00:00+01:00
      fairgate key list --tenant acme
      fairgate key rotate key_… --grace 1h
      fairgate key revoke key_… --now
    """


@key.command()
@click.option("--tenant", required=True, help="Whose key it is (name or id).")
@click.option("--project", help="Project of the tenant; made when it is new.  [default: default]")
@click.option("--name", default="", help="A name for people.")
@click.option(
    "--scope",
    "scopes",
    **SCOPE,
    help="What the key may do (repeat).  [default: inference, quote and usage:read]",
)
@click.option(
    "--expires-in",
    "expires_in_s",
    type=Duration(),
    help="Life time, such as 12h or 30d.  [default: for ever]",
)
@click.option("--expires", help="Its end in place of that: ISO 8601 with a time zone.")
@click.option("--model", "models", multiple=True, help="Model it may use (repeat; default: all).")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(TIERS),
    help="Tier it may use (repeat).  [default: the tenant's]",
)
@click.option(
    "--default-tier",
    type=click.Choice(TIERS),
    help="Tier of its requests that name none.  [default: the tenant's]",
)
@ALLOW_FROM
def create(
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    tiers: tuple[str, ...],
    allow_from: tuple[str, ...],
    **options: Any,
) -> None:
    """Creates a key and shows its secret, this once.

    \b
    --json answers:
      {"key": "fg_live_…", "id": "key_…", "tenant_id": "ten_…", "tenant": "acme", "project_id": "prj_…",
       "project": "default", "name": "", "prefix": "fg_live_4kXb…", "scopes": ["inference", "quote",
       "usage:read"], "models": null, "default_tier": null, "allow_from": ["10.0.0.0/8"],
       "expires_at": null, …}
    """
    wanted = KeyCreate(
        scopes=list(scopes) or None,
        models=list(models) or None,
        tiers=list(tiers) or None,
        allow_from=list(allow_from) or None,
        **options,
    )

    async def create_in_project(admin: Admin) -> tuple[ApiKey, str]:
        project, tenant = wanted.project, wanted.tenant
        known = {text for row in await admin.projects.all(tenant) for text in (row.name, row.project_id)}
        if project is not None and project not in known:
            await admin.projects.create(actor(), ProjectCreate(tenant=tenant, name=project))
        return await admin.keys.create(actor(), wanted)

    (made, secret), shown = named_one(create_in_project, _with_secret)
    answer(
        shown,
        f"{secret}\n\nThis is the only time that the secret is shown. Its id is {made.key_id}.",
    )


@key.command(name="set")
@click.argument("key_id")
@ALLOW_FROM
@click.option("--allow-from-anywhere", is_flag=True, help="It may be used from anywhere again.")
@click.option("--name", help="A name for people; '' takes it away.")
@click.option(
    "--default-tier",
    type=click.Choice([*TIERS, OF_TENANT]),
    help="Tier of its requests that name none; tenant: the tenant's again.",
)
@click.option("--scope", "scopes", **SCOPE, help="What it may do (repeat: together they are all).")
@click.option("--model", "models", multiple=True, help="Model it may use (repeat: together they are all).")
@click.option("--all-models", is_flag=True, help="It may use its tenant's models again.")
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice([*TIERS, OF_TENANT]),
    help="Tier it may use (repeat: together they are all); tenant: the tenant's again.",
)
@click.option("--expires-in", "expires_in_s", type=Duration(), help="Its end, from now: 12h or 30d.")
@click.option("--expires", help="Its end: ISO 8601 with a time zone; never: it has none.")
def set_(
    key_id: str,
    allow_from: tuple[str, ...],
    allow_from_anywhere: bool,
    name: str | None,
    default_tier: str | None,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    all_models: bool,
    tiers: tuple[str, ...],
    expires_in_s: float | None,
    expires: str | None,
) -> None:
    """Changes a key; what is not named stays, also when it is rotated. KEY_ID may be its prefix.

    In force in every gateway when this returns, from the next request on; a new end also ends what waits.

    \b
    --json answers what `key create` answers, without "key".
    """
    if allow_from and allow_from_anywhere:
        raise click.UsageError("give --allow-from CIDR (repeat) or --allow-from-anywhere, not both")
    if models and all_models:
        raise click.UsageError("give --model (repeat) or --all-models, not both")
    if OF_TENANT in tiers and len(tiers) > 1:
        raise click.UsageError(
            "--tier tenant stands for all tiers of the tenant: name no other one beside it"
        )
    wanted = KeyChange(
        name=name,
        default_tier="" if default_tier == OF_TENANT else default_tier,
        allow_from=list(allow_from) if allow_from or allow_from_anywhere else None,
        scopes=list(scopes) or None,
        models=list(models) if models or all_models else None,
        tiers=[] if OF_TENANT in tiers else list(tiers) or None,
        expires="" if expires == NEVER else expires,
        expires_in_s=expires_in_s,
    )
    if wanted == KeyChange():
        raise click.UsageError(
            "say what changes: --name, --default-tier, --scope, --model, --all-models, --tier, --expires,"
            " --expires-in, --allow-from CIDR (repeat), or --allow-from-anywhere"
        )
    changed, shown = named_one(lambda admin: admin.keys.update(actor(), key_id, wanted), ApiKey.as_json)
    answer(shown, f"key {changed.key_id} {changed.name or 'without a name'}: {_in_words(changed)}")


def _in_words(key: ApiKey) -> str:
    tiers = "its tenant's" if key.tiers is None else ", ".join(tier_names(key.tiers))
    models = "its tenant's" if key.models is None else ", ".join(sorted(key.models))
    default = key.default_tier.value if key.default_tier else "its tenant's default"
    where = ", ".join(map(str, key.allow_from)) or "anywhere"
    end = NEVER if key.expires_at is None else key.expires_at.isoformat()
    return (
        f"{', '.join(sorted(key.scopes))}; tiers: {tiers}; models: {models}; tier {default};"
        f" may be used from {where}; ends: {end}"
    )


@key.command(name="list")
@click.option("--tenant", help="Only this tenant's (name or id).")
def list_(tenant: str | None) -> None:
    """Lists keys, without their secrets.

    \b
    --json answers a list of what `key create` answers, without "key", with "status":
      [{"id": "key_…", "prefix": "fg_live_4kXb…", "status": "active", "last_used_at": null, …}]
    """
    now = datetime.now(UTC)
    uses: dict[str, datetime] = {}

    async def read(admin: Admin) -> list[ApiKey]:
        keys = await admin.keys.all(tenant)
        uses.update(await admin.keys.last_uses(keys))
        return keys

    def shown_with_use(item: ApiKey) -> dict[str, Any]:
        used_at = uses.get(item.key_id)
        last_used_at = None if used_at is None else used_at.isoformat()
        return item.as_json() | {"status": item.status(now), "last_used_at": last_used_at}

    listed, shown = named_list(read, shown_with_use)
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
            "never" if item.key_id not in uses else uses[item.key_id].strftime("%Y-%m-%d %H:%M"),
            ", ".join(map(str, item.allow_from)),
        )
        for item, named in zip(listed, shown, strict=True)
    ]
    columns = (
        "id",
        "name",
        "tenant",
        "project",
        "prefix",
        "status",
        "scopes",
        "expires",
        "last used",
        "from",
    )
    answer(shown, lambda: table("keys", columns, rows))


@key.command()
@click.argument("key_id")
@NOW
def revoke(key_id: str, now: bool) -> None:
    """Revokes a key for good, in every gateway when this returns; what waits ends, refunded. What runs goes
    on to its end, or with --now ends as well. KEY_ID may be its prefix.

    \b
    --json answers what `key create` answers, without "key", with "revoked_at" and, with --now, "now": true.
    Exit code 3: a gateway has not confirmed it ("not_in_force_on").
    """
    revoked, shown = named_one(lambda admin: admin.keys.revoke(actor(), key_id, now=now), ApiKey.as_json)
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
        lambda admin: admin.keys.rotate(actor(), key_id, grace_s=grace), _with_secret
    )
    answer(
        shown,
        f"{secret}\n\nThe secret is shown this once. The old one works for {grace:g} s more.",
    )


def _with_secret(made: tuple[ApiKey, str]) -> dict[str, Any]:
    key, secret = made
    return {"key": secret} | key.as_json()
