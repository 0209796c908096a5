"""Admin acts on keys."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection, delete, insert, update

from tenants.admin.audit import Actor
from tenants.admin.record_acts import RecordActs
from tenants.admin.transaction import Change, IfMatch
from tenants.directory import queries
from tenants.directory.keys import PEPPER_SETTING, fingerprint, new_id, new_secret, prefix_of
from tenants.errors import Invalid, PepperMismatch
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.nouns.key import (
    DEFAULT_GRACE_S,
    MAX_GRACE_S,
    MAX_KEYS_PER_TENANT,
    MAX_SECRETS_PER_KEY,
    ApiKey,
    KeyChange,
    KeyCreate,
    changed_key,
    new_key,
)
from tenants.nouns.project import DEFAULT_PROJECT
from tenants.storage import tables


class KeyActs(RecordActs[ApiKey]):
    kind = "key"
    table = tables.api_keys

    def find(self, connection: Connection, reference: str, tenant: str | None = None) -> ApiKey:
        return find(connection, reference, tenant)

    async def create(self, actor: Actor | str, wanted: KeyCreate) -> tuple[ApiKey, str]:
        """Returns the key with its secret, which cannot be read again."""
        secret = new_secret(self._transactions.pepper)

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            self._check_pepper(connection)
            owner = queries.find_tenant(connection, wanted.tenant)
            home = queries.find_project(connection, wanted.project or DEFAULT_PROJECT, owner)
            draft = new_key(wanted, owner, home.project_id, now_us)
            have = queries.count(
                connection,
                tables.api_keys,
                tables.api_keys.c.tenant_id == owner.tenant_id,
                tables.api_keys.c.revoked_us.is_(None),
            )
            if have >= MAX_KEYS_PER_TENANT:
                raise Invalid("key", f"a tenant has at most {MAX_KEYS_PER_TENANT} keys; revoke an unused one")
            key = replace(draft, key_id=new_id("key"), prefix=prefix_of(secret.public_id))
            connection.execute(insert(tables.api_keys).values(**key.as_row()))
            _insert_secret(connection, key.key_id, secret.public_id, secret.digest, now_us)
            return Change(key, key.key_id, owner.tenant_id, after=key.as_json())

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

        def edit(connection: Connection, before: ApiKey, now_us: int) -> ApiKey:
            owner = queries.find_tenant(connection, before.tenant_id)
            return changed_key(before, wanted, owner, now_us)

        return await self._edit(actor, "update", key, tenant, edit, if_match)

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

        def edit(connection: Connection, before: ApiKey, now_us: int) -> ApiKey:
            revoked_at = before.revoked_at or from_us(now_us)
            return replace(before, revoked_at=revoked_at, ends_running=before.ends_running or now)

        return await self._edit(actor, "revoke", key, tenant, edit, if_match)

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
        checks.seconds("grace_s", grace_s, MAX_GRACE_S)
        secret = new_secret(self._transactions.pepper)
        stored = tables.key_secrets

        def change(connection: Connection, now_us: int) -> Change[ApiKey]:
            self._check_pepper(connection)
            before = find(connection, key, tenant)
            if before.revoked_at is not None:
                raise Invalid("key", "was revoked; create a new one")
            mine = stored.c.key_id == before.key_id
            connection.execute(delete(stored).where(mine, stored.c.expires_us <= now_us))
            if queries.count(connection, stored, mine) >= MAX_SECRETS_PER_KEY:
                raise Invalid(
                    "key",
                    f"{MAX_SECRETS_PER_KEY} of its secrets are valid; wait for the end of a grace",
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

    async def show(self, key: str) -> ApiKey:
        return await self._transactions.read(lambda connection: queries.find_key(connection, key))

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


def find(connection: Connection, key: str, tenant: str | None) -> ApiKey:
    """By id or visible prefix, with `tenant` only among its keys. Raises `NotFound`."""
    tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
    return queries.find_key(connection, key, tenant_id)


def _insert_secret(connection: Connection, key_id: str, public_id: str, digest: bytes, now_us: int) -> None:
    connection.execute(
        insert(tables.key_secrets).values(
            public_id=public_id, key_id=key_id, digest=digest, created_us=now_us
        )
    )
