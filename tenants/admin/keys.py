"""Admin acts on keys, and their pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, insert, not_, update

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.commands import KeyChange, KeyCreate
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Number,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.drafts import changed_key, check_within, chosen_default_tier, chosen_tiers, end_of_key_us
from tenants.admin.lists import key_hygiene
from tenants.admin.lists.key_hygiene import KeyFinding
from tenants.admin.lists.scans import end_of_scan
from tenants.admin.projects import DEFAULT_PROJECT
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.directory import key_uses, queries
from tenants.directory.keys import PEPPER_SETTING, fingerprint, new_id, new_key
from tenants.directory.records import ApiKey, from_us, tier_names, to_us
from tenants.errors import Invalid, PepperMismatch
from tenants.networks import Network
from tenants.storage import tables

DEFAULT_SCOPES = ("inference", "quote", "usage:read")
DEFAULT_GRACE_S = 86_400.0


class KeyActs(AdminActs):
    async def create(
        self,
        actor: Actor | str,
        wanted: KeyCreate,
    ) -> tuple[ApiKey, str]:
        """Returns the key with its secret, which cannot be read again. `models` and `tiers` None: the
        tenant's, also when those change later; otherwise they must lie within the tenant's."""
        chosen_scopes = validation.scopes(DEFAULT_SCOPES if wanted.scopes is None else wanted.scopes)
        chosen_models, chosen = validation.models(wanted.models), chosen_tiers(wanted.tiers)
        networks = validation.networks(wanted.allow_from)
        if wanted.name:
            validation.name("name", wanted.name)
        default = chosen_default_tier(wanted.default_tier)
        secret = new_key(self._transactions.pepper)

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            self._check_pepper(connection)
            owner = queries.find_tenant(connection, wanted.tenant)
            expires_us = end_of_key_us(now_us, wanted.expires, wanted.expires_in_s)
            check_within(owner, chosen_models, chosen, default)
            home = queries.find_project(connection, wanted.project or DEFAULT_PROJECT, owner)
            have = queries.count(
                connection,
                tables.api_keys,
                tables.api_keys.c.tenant_id == owner.tenant_id,
                tables.api_keys.c.revoked_us.is_(None),
            )
            if have >= validation.MAX_KEYS_PER_TENANT:
                raise Invalid(
                    "key",
                    f"a tenant has at most {validation.MAX_KEYS_PER_TENANT} keys; revoke an unused one",
                )
            key_id = new_id("key")
            connection.execute(
                insert(tables.api_keys).values(
                    id=key_id,
                    tenant_id=owner.tenant_id,
                    project_id=home.project_id,
                    name=wanted.name,
                    scopes=sorted(chosen_scopes),
                    models=None if chosen_models is None else sorted(chosen_models),
                    tiers=None if chosen is None else tier_names(chosen),
                    default_tier=default.value if default else None,
                    created_us=now_us,
                    expires_us=expires_us,
                    allow_from=_network_column(networks),
                )
            )
            _insert_secret(connection, key_id, secret.public_id, secret.digest, now_us)
            key = queries.find_key(connection, key_id)
            return Change(key, key_id, owner.tenant_id, after=key.as_json())

        return await self._transactions.act(actor, "key.create", change), secret.text

    async def update(
        self,
        actor: Actor | str,
        key: str,
        wanted: KeyChange,
        tenant: str | None = None,
        *,
        if_match: IfMatch = None,
    ) -> ApiKey:
        """By id or visible prefix. Its end counts for waiting requests, too; the rest from the next request
        on. With `tenant` only a key of that tenant is found."""

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            before = _find(connection, key, tenant)
            owner = queries.find_tenant(connection, before.tenant_id)
            after = changed_key(before, wanted, owner, now_us)
            connection.execute(
                update(tables.api_keys)
                .where(tables.api_keys.c.id == before.key_id)
                .values(
                    name=after.name,
                    scopes=sorted(after.scopes),
                    models=None if after.models is None else sorted(after.models),
                    tiers=None if after.tiers is None else tier_names(after.tiers),
                    default_tier=after.default_tier.value if after.default_tier else None,
                    expires_us=None if after.expires_at is None else to_us(after.expires_at),
                    allow_from=_network_column(after.allow_from),
                )
            )
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._transactions.act(actor, "key.update", change, if_match)

    async def revoke(
        self,
        actor: Actor | str,
        key: str,
        tenant: str | None = None,
        *,
        now: bool = False,
        if_match: IfMatch = None,
    ) -> ApiKey:
        """By id or visible prefix; its waiting and running requests as of `TenantActs.suspend`. Revoking
        twice changes nothing, but that `now` ends what runs. With `tenant` only one of its keys is found."""

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            before = _find(connection, key, tenant)
            connection.execute(
                update(tables.api_keys)
                .where(tables.api_keys.c.id == before.key_id, tables.api_keys.c.revoked_us.is_(None))
                .values(revoked_us=now_us)
            )
            if now:
                connection.execute(
                    update(tables.api_keys)
                    .where(tables.api_keys.c.id == before.key_id)
                    .values(ends_running=True)
                )
            after = queries.find_key(connection, before.key_id)
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._transactions.act(actor, "key.revoke", change, if_match)

    async def rotate(
        self,
        actor: Actor | str,
        key: str,
        grace_s: float = DEFAULT_GRACE_S,
        tenant: str | None = None,
        *,
        if_match: IfMatch = None,
    ) -> tuple[ApiKey, str]:
        """Gives a key a new secret (id, limits and scopes stay); older secrets work `grace_s` longer."""
        validation.seconds("grace_s", grace_s, validation.MAX_GRACE_S)
        secret = new_key(self._transactions.pepper)
        stored = tables.key_secrets

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            self._check_pepper(connection)
            before = _find(connection, key, tenant)
            if before.revoked_at is not None:
                raise Invalid("key", "was revoked; create a new one")
            mine = stored.c.key_id == before.key_id
            connection.execute(delete(stored).where(mine, stored.c.expires_us <= now_us))
            if queries.count(connection, stored, mine) >= validation.MAX_SECRETS_PER_KEY:
                raise Invalid(
                    "key",
                    f"{validation.MAX_SECRETS_PER_KEY} of its secrets are valid; wait for the end of a grace",
                )
            until_us = now_us + round(grace_s * 1e6)
            connection.execute(
                update(stored)
                .where(mine, stored.c.expires_us.is_(None) | (stored.c.expires_us > until_us))
                .values(expires_us=until_us)
            )
            _insert_secret(connection, before.key_id, secret.public_id, secret.digest, now_us)
            after = queries.find_key(connection, before.key_id)
            return Change(after, after.key_id, after.tenant_id, before.as_json(), after.as_json())

        return await self._transactions.act(actor, "key.rotate", change, if_match), secret.text

    async def all(self, tenant: str | None = None) -> list[ApiKey]:
        """Revoked ones included."""

        def find(connection: Connection) -> list[ApiKey]:
            if tenant is None:
                return queries.keys_where(connection)
            return queries.keys_of(connection, [queries.find_tenant(connection, tenant).tenant_id])

        return await self._transactions.read(find)

    async def show(self, key: str) -> ApiKey:
        return await self._transactions.read(lambda connection: queries.find_key(connection, key))

    async def page(
        self,
        tenant: str | None = None,
        *,
        finding: KeyFinding | None = None,
        only: frozenset[str] | None = None,
        cursor: str | None = None,
        limit: int = DEFAULT_PAGE,
    ) -> Page[ApiKey]:
        """In order of creation, revoked ones included. `finding`: working keys with it, looked for in a
        bounded number of keys a page; `only`: of these tenants (ids). Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant, "finding": finding}
        table, now = tables.api_keys, from_us(self._transactions.now_us())
        order = (table.c.created_us, table.c.id)
        last = None if cursor is None else decode_cursor("keys", filters, cursor, tuple[Number, Text])

        def look(connection: Connection) -> tuple[list[ApiKey], tuple[int | str, ...] | None]:
            wanted = [] if last is None else [beyond(order, last)]
            if tenant is not None:
                wanted.append(table.c.tenant_id == queries.find_tenant(connection, tenant).tenant_id)
            if only is not None:
                wanted.append(table.c.tenant_id.in_(sorted(only)))
            end = None
            if finding is not None:
                end = end_of_scan(connection, order, wanted, newest_first=False)
                wanted.append(key_hygiene.condition(finding, now))
                if end is not None:
                    wanted.append(not_(beyond(order, end)))
            return queries.keys_where(connection, *wanted, most=most + 1), end

        rows, end = await self._transactions.read(look)
        return page_of(
            rows,
            most,
            "keys",
            filters,
            lambda key: (to_us(key.created_at), key.key_id),
            scanned_to=end,
        )

    async def last_uses(self, keys: Sequence[ApiKey]) -> dict[str, datetime]:
        """By id; keys that were never used are left out."""
        key_ids = [key.key_id for key in keys]
        used_us = await self._transactions.read(lambda connection: key_uses.last_uses(connection, key_ids))
        return {key_id: from_us(at_us) for key_id, at_us in used_us.items()}

    async def is_own_pepper(self) -> bool:
        """Whether the keys in this database, if any, were made with this pepper."""
        stored = await self._transactions.read(lambda connection: queries.setting(connection, PEPPER_SETTING))
        return stored in (None, fingerprint(self._transactions.pepper))

    def _check_pepper(self, connection: Connection) -> None:
        """The first key stores the pepper's fingerprint. Raises `PepperMismatch` for another pepper."""
        stored, own = queries.setting(connection, PEPPER_SETTING), fingerprint(self._transactions.pepper)
        if stored is None:
            connection.execute(insert(tables.settings).values(name=PEPPER_SETTING, value=own))
        elif stored != own:
            raise PepperMismatch


def _find(connection: Connection, key: str, tenant: str | None) -> ApiKey:
    tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
    return queries.find_key(connection, key, tenant_id)


def _network_column(networks: Iterable[Network]) -> list[str] | None:
    return [str(network) for network in networks] or None


def _insert_secret(connection: Connection, key_id: str, public_id: str, digest: bytes, now_us: int) -> None:
    connection.execute(
        insert(tables.key_secrets).values(
            public_id=public_id, key_id=key_id, digest=digest, created_us=now_us
        )
    )
