"""API keys, each with its last use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from sqlalchemy import Connection

from tenants.admin import keys as admin_keys
from tenants.admin.admin import Admin
from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.admin.lists import key_hygiene
from tenants.admin.lists.key_hygiene import KeyFinding
from tenants.admin.lists.scans import end_of_scan
from tenants.directory import key_uses, queries
from tenants.instants import from_us, to_us
from tenants.nouns.key import ApiKey, KeyChange, KeyCreate, KeyRotate
from tenants.nouns.tenant import Withdrawal
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.reading import conditions_of
from tenants.resources.resource import ActCall, ActDone, PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Json, Shown
from tenants.resources.table_acts import answering
from tenants.storage.tables import api_keys

ORDER = (api_keys.c.created_us, api_keys.c.id)


class KeyQuery(ListQuery, frozen=True):
    """Which keys. None: all, revoked ones included."""

    tenant: Annotated[str | None, Filter(api_keys.c.tenant_id, Kind.TENANT)] = None
    finding: Annotated[
        str | None,
        Filter(kind=Kind.CHOICE, choices=tuple(KeyFinding), help="Only working keys that it holds for."),
    ] = None


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key as it is at a time."""

    key: ApiKey
    status: str
    last_used_at: datetime | None
    """Within a minute or so; None: never."""

    def as_json(self) -> Json:
        last_used_at = None if self.last_used_at is None else self.last_used_at.isoformat()
        return self.key.as_json() | {"status": self.status, "last_used_at": last_used_at}


def with_uses(connection: Connection, keys: Sequence[ApiKey], now_us: int) -> list[ListedKey]:
    used_us, now = key_uses.last_uses(connection, [key.key_id for key in keys]), from_us(now_us)
    return [
        ListedKey(key, key.status(now), from_us(used_us[key.key_id]) if key.key_id in used_us else None)
        for key in keys
    ]


def find(connection: Connection, reference: str, tenant: str | None, now_us: int) -> ListedKey:
    """By id or visible prefix."""
    return with_uses(connection, [admin_keys.find(connection, reference, tenant)], now_us)[0]


def _read(connection: Connection, request: PageRequest) -> tuple[list[ListedKey], SortKey | None]:
    """In order of creation. Those with a finding are looked for in a bounded number of keys a page."""
    wanted = [] if request.after is None else [beyond(ORDER, request.after)]
    wanted += conditions_of(connection, request).values()
    if request.only is not None:
        wanted.append(api_keys.c.tenant_id.in_(sorted(request.only)))
    end = None
    if request.query.finding is not None:
        end = end_of_scan(connection, ORDER, wanted, newest_first=False)
        wanted.append(key_hygiene.condition(KeyFinding(request.query.finding), from_us(request.now_us)))
        if end is not None:
            wanted.append(~beyond(ORDER, end))
    keys = queries.keys_where(connection, *wanted, most=request.most)
    return with_uses(connection, keys, request.now_us), end


async def _create(admin: Admin, call: ActCall) -> ActDone:
    return _with_secret(*await admin.keys.create(call.actor, call.command))


async def _rotate(admin: Admin, call: ActCall) -> ActDone:
    grace_s, acts = call.command.grace_s, admin.keys
    return _with_secret(
        *await acts.rotate(call.actor, call.reference, grace_s, call.tenant, if_match=call.if_match)
    )


def _with_secret(key: ApiKey, secret: str) -> ActDone:
    return ActDone(key.as_json() | {"key": secret}, key.as_json())


def _in_words(key: Mapping[str, Any]) -> str:
    tiers, models = (
        "its tenant's" if key[name] is None else ", ".join(key[name]) for name in ("tiers", "models")
    )
    default = key["default_tier"] or "its tenant's default"
    return (
        f"key {key['id']} {key['name'] or 'without a name'}: {', '.join(key['scopes'])}; tiers: {tiers};"
        f" models: {models}; tier {default}; may be used from"
        f" {', '.join(key['allow_from']) or 'anywhere'}; ends: {key['expires_at'] or 'never'}"
    )


CREATE = ResourceAct(
    "key.create",
    _create,
    command=KeyCreate,
    status=201,
    takes_condition=False,
    scope="admin:write",
    act=Act.MAKE_KEY,
    summary="Create a key",
    description="The answer's `key` is the secret, shown this once.",
    command_help="""Creates a key and shows its secret, only this once.

\b
--json answers:
  {"id": "key_…", "tenant_id": "ten_…", "tenant": "acme", "project_id": "prj_…", "project": "default",
   "name": "", "prefix": "fg_live_4kXb…", "scopes": ["inference", "quote", "usage:read"],
   "models": null, "default_tier": null, "allow_from": ["10.0.0.0/8"], "expires_at": null, …,
   "key": "fg_live_…"}
""",
    words=lambda key: (
        f"{key['key']}\n\nThis is the only time that the secret is shown. Its id is {key['id']}."
    ),
)
KEYS = Resource(
    name="key",
    plural="keys",
    title="Keys",
    query=KeyQuery,
    read=_read,
    order=ORDER,
    key_of=lambda row: (to_us(row.key.created_at), row.key.key_id),
    as_json=ListedKey.as_json,
    find=find,
    stored=lambda row: row.key.as_json(),
    one_description="Without its secret. `key` is its id or the visible prefix of its secret.",
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List keys, of one tenant or of all, in order of creation",
    description="Revoked ones included. `last_used_at`: within a minute or so; null: never. With `finding` a"
    f" page may be shorter than `limit` before the list ends. {PAGES}",
    has_page=False,
    is_whole=True,
    shown=(
        Shown("id", "Id"),
        Shown("name", "Name"),
        Shown("tenant", "Tenant", Form.TENANT),
        Shown("project", "Project", Form.PROJECT),
        Shown("prefix", "Prefix"),
        Shown("status", "Status"),
        Shown("scopes", "Scopes"),
        Shown("expires_at", "Expires", Form.INSTANT),
        Shown("last_used_at", "Last used", Form.INSTANT, missing="never"),
        Shown("allow_from", "From"),
    ),
    file=(
        *(
            "id",
            "name",
            "prefix",
            "tenant_id",
            "tenant",
            "project_id",
            "project",
            "status",
            "scopes",
            "models",
        ),
        *("tiers", "default_tier", "allow_from", "created_at", "expires_at", "revoked_at", "last_used_at"),
        "display_name",
    ),
    acts=(
        CREATE,
        ResourceAct(
            "key.update",
            answering(
                lambda admin, call: admin.keys.update(
                    call.actor, call.reference, call.command, if_match=call.if_match
                )
            ),
            command=KeyChange,
            method="PATCH",
            path="/{reference}",
            scope="admin:write",
            act=Act.CHANGE_KEY,
            summary="Change a key",
            description="What is not named stays as it is. In force from the next request on; a new end also"
            " counts for what waits.",
            command_verb="set",
            command_help="""Changes a key; options that are not given stay. KEY is an id or prefix.

    In force in every gateway when this returns, from the next request on; an earlier expiry also ends waiting
    requests.

    \b
    --json answers what `key create` answers, without "key".
    """,
            words=_in_words,
        ),
        ResourceAct(
            "key.rotate",
            _rotate,
            command=KeyRotate,
            is_body_optional=True,
            path="/{reference}/rotate",
            scope="admin:write",
            act=Act.MAKE_KEY,
            summary="Give a key a new secret",
            description="Older secrets work `grace_s` longer.",
            command_help="""Gives a key a new secret, shown once; the old one works for the grace period.

    \b
    --json answers what `key create` answers.
    """,
            words=lambda key: (
                f"{key['key']}\n\nThe secret is shown this once. The old one works until the grace time ends."
            ),
        ),
        ResourceAct(
            "key.revoke",
            answering(
                lambda admin, call: admin.keys.revoke(
                    call.actor, call.reference, now=call.command.now, if_match=call.if_match
                )
            ),
            command=Withdrawal,
            is_body_optional=True,
            method="DELETE",
            path="/{reference}",
            scope="admin:write",
            act=Act.REVOKE_KEY,
            summary="Revoke a key",
            description="For good. Waiting and running requests as of a suspended tenant.",
            command_help="""Revokes a key for good, in every gateway when this returns.

    Waiting requests end and are refunded; running ones finish, or end with --now. KEY is an id or prefix.

    \b
    --json answers what `key create` answers, without "key", with "revoked_at" and, with --now, "now": true.
    Exit code 3: a gateway has not confirmed it ("not_in_force_on").
    """,
            words=lambda key: f"key {key['id']} of {key['tenant']} revoked",
        ),
    ),
    group_help="""API keys of tenants.

    A key is shown once, when it is created, and can be revoked within a second.

    \b
      fairgate key create --tenant acme
      fairgate key create --tenant acme --scope usage:read --expires-in 30d
      fairgate key create --tenant acme --allow-from 10.0.0.0/8 --allow-from 2001:db8::/32
      fairgate key set key_… --allow-from 10.1.0.0/16 --name robot --default-tier batch
      fairgate key set key_… --scope inference --tier batch --expires 2027-01-31T18:00:00+01:00
      fairgate key list --tenant acme
      fairgate key rotate key_… --grace 1h
      fairgate key revoke key_… --now
    """,
    command_help="""Lists keys, without their secrets.

    \b
    --json answers a list of what `key create` answers, without "key", with "status":
      [{"id": "key_…", "prefix": "fg_live_4kXb…", "status": "active", "last_used_at": null, …}]
    """,
)
