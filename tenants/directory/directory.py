"""In-memory directory of tenants, projects and API keys; authenticates requests.

`authenticate` is a look-up and one HMAC, no SQL. A poller reads the directory's revision four times a second
and reloads changed tenants, so an admin act made anywhere takes effect within a second. An unknown key
triggers a refresh (`look_again`). While the database is down the last known state serves for `max_stale_s`
(for that long a revocation may be unseen), then `authenticate` fails closed (`DatabaseUnavailable`)."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection

from tenants.directory import queries
from tenants.directory.keys import PEPPER_SETTING, check_pepper, digest_key, fingerprint, public_id_of
from tenants.errors import DatabaseUnavailable, KeyReason, KeyRejected, PepperMismatch
from tenants.instants import to_us
from tenants.nouns.alias import Alias
from tenants.nouns.key import ApiKey
from tenants.nouns.project import Project
from tenants.nouns.tenant import Tenant
from tenants.pricing.pricing import PriceBook
from tenants.storage import tables
from tenants.storage.database import Database
from tenants.storage.task_stop import stop
from tenants.types import PLATFORM, Limit, Principal, SubjectKind, Tier

POLL_INTERVAL_S = 0.25
MAX_STALE_S = 60.0
LOOK_AGAIN_EVERY_S = 0.01
"""Least interval of refreshes for unknown keys, so that guessing keys causes no more of them."""
LOOK_AGAIN_MOST_S = 1.0
"""Longest wait for such a refresh."""


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    refusal: KeyReason | None
    expires_us: int | None
    key_expires_us: int | None
    """The key's own, whichever secret was used."""
    ends_running: bool
    """A refusal also ends what runs."""
    principal: Principal
    """With the limits of its tenant alone while it is loaded; then with the platform's as well."""


@dataclass(frozen=True, slots=True)
class _TenantState:
    tenant: Tenant
    limits: tuple[Limit, ...]
    entries: dict[str, _Entry]


@dataclass(frozen=True, slots=True)
class _Loaded:
    revision: int
    pepper_fingerprint: str | None
    prices: PriceBook | None = None
    """None: unchanged."""
    platform: tuple[Limit, ...] | None = None
    """Limits on all tenants together; None: unchanged."""
    aliases: Mapping[str, Alias] | None = None
    """Of models; None: unchanged."""
    everything: bool = False
    """A full load, not only changes: anything missing does not exist."""
    states: list[_TenantState] = field(default_factory=list)


class Directory:
    """The directory of a running server. `start` it before use; `close` it."""

    def __init__(
        self,
        database: Database,
        pepper: bytes,
        *,
        poll_interval_s: float = POLL_INTERVAL_S,
        max_stale_s: float = MAX_STALE_S,
        processes: int = 1,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`processes`: that share the rate of refreshes for unknown keys."""
        self._database = database
        self._pepper = check_pepper(pepper)
        self._poll_interval_s = poll_interval_s
        self._look_again_every_s = LOOK_AGAIN_EVERY_S * processes
        self._max_stale_s = max_stale_s
        self._monotonic = monotonic
        self._revision = -1
        self._prices = PriceBook()
        self.aliases: Mapping[str, Alias] = {}
        """Stored aliases of models, by name."""
        self._platform: tuple[Limit, ...] = ()
        self._fresh_at_s = monotonic()
        self._tenants: dict[str, _TenantState] = {}
        self._entries: dict[str, _Entry] = {}
        self._by_key: dict[str, _Entry] = {}
        self._poller: asyncio.Task[None] | None = None
        self._refreshing = asyncio.Lock()
        self._looking_again = asyncio.Lock()
        self._refreshed_s = -math.inf
        self._polled = asyncio.Event()

    async def start(self) -> None:
        """Loads everything, then follows changes. Raises `DatabaseUnavailable` or `PepperMismatch`."""
        await self.refresh()
        self._poller = asyncio.create_task(self._follow(), name="directory-poller")

    async def close(self) -> None:
        """Stops following changes; the loaded state serves until it is stale."""
        if self._poller is not None:
            await stop([self._poller])
            self._poller = None

    @property
    def revision(self) -> int:
        """The loaded revision; grows with every admin act."""
        return self._revision

    @property
    def stale_s(self) -> float:
        """Seconds since the database last confirmed the loaded state."""
        return max(0.0, self._monotonic() - self._fresh_at_s)

    def authenticate(self, secret: str, now_s: float) -> Principal:
        """`now_s`: Unix seconds. Raises `KeyRejected`, `DatabaseUnavailable` (database away for too long)."""
        if self.stale_s > self._max_stale_s:
            raise DatabaseUnavailable("the directory could not be refreshed; keys cannot be checked now")
        public_id = public_id_of(secret)
        entry = self._entries.get(public_id)
        digest = digest_key(self._pepper, secret)
        # Only a caller with the whole secret learns that it was revoked, expired or suspended.
        if entry is None or not hmac.compare_digest(digest, entry.digest):
            raise KeyRejected("unknown")
        if entry.refusal is not None:
            raise KeyRejected(entry.refusal, entry.principal.ids)
        if entry.expires_us is not None and now_s * 1e6 >= entry.expires_us:
            raise KeyRejected("expired", entry.principal.ids)
        return entry.principal

    def standing(self, key_id: str, now_s: float) -> Principal:
        """The current principal of a key that was authenticated before. Raises `KeyRejected`."""
        entry = self._by_key.get(key_id)
        if entry is None:
            raise KeyRejected("unknown")
        if entry.refusal is not None:
            raise KeyRejected(entry.refusal)
        if entry.key_expires_us is not None and now_s * 1e6 >= entry.key_expires_us:
            raise KeyRejected("expired")
        return entry.principal

    def ends_running(self, key_id: str) -> bool:
        """Whether the key's requests end: it was revoked, or its tenant or project suspended, with `now`."""
        entry = self._by_key.get(key_id)
        return entry is not None and entry.refusal is not None and entry.ends_running

    def tenant(self, tenant_id: str) -> Tenant | None:
        state = self._tenants.get(tenant_id)
        return None if state is None else state.tenant

    def tenants(self) -> list[Tenant]:
        """Every tenant by name, suspended ones included."""
        return sorted((state.tenant for state in self._tenants.values()), key=lambda tenant: tenant.name)

    def limits(self, now_s: float, tenant_id: str | None = None) -> list[Limit]:
        """In force at `now_s` (Unix seconds): all, or one tenant's with those below it, or `PLATFORM`'s."""
        by_tenant = {known_id: state.limits for known_id, state in self._tenants.items()} | {
            PLATFORM: self._platform
        }
        chosen = by_tenant.values() if tenant_id is None else [by_tenant.get(tenant_id, ())]
        return [limit.at(now_s) for limits in chosen for limit in limits]

    @property
    def has_ceilings(self) -> bool:
        """Whether some limit may now refill faster than at its rate."""
        held = (self._platform, *(state.limits for state in self._tenants.values()))
        return any(limit.follows_spare_capacity for limits in held for limit in limits)

    @property
    def prices(self) -> PriceBook:
        return self._prices

    async def prices_at(self, version: int) -> PriceBook:
        """The price book of that version; 0: the current one. Raises `DatabaseUnavailable`."""
        if version in (0, self._prices.version):
            return self._prices
        return await self._database.read(lambda connection: queries.price_book(connection, version))

    async def refresh(self) -> None:
        """Loads changes now, instead of within `poll_interval_s`."""
        async with self._refreshing:
            asked_at_s = self._monotonic()
            since, prices_version = self._revision, self._prices.version
            loaded = await self._database.read(lambda connection: _load(connection, since, prices_version))
            if loaded.pepper_fingerprint not in {None, fingerprint(self._pepper)}:
                raise PepperMismatch
            self._apply(loaded)
            self._fresh_at_s = asked_at_s

    async def look_again(self) -> bool:
        """Refreshes for an unknown key, which may be new; returns whether anything changed."""
        before = self._revision
        async with self._looking_again:
            if self._monotonic() - self._refreshed_s >= self._look_again_every_s:
                with suppress(DatabaseUnavailable, PepperMismatch, TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_MOST_S):
                        await self.refresh()
                self._refreshed_s = self._monotonic()
        return self._revision != before

    async def next_poll(self) -> None:
        """Returns after the next refresh; what was committed before is loaded by the second at the latest."""
        await self._polled.wait()

    def _apply(self, loaded: _Loaded) -> None:
        if loaded.everything:
            self._tenants.clear()
            self._entries.clear()
            self._by_key.clear()
        changed = loaded.states
        if loaded.platform is not None and loaded.platform != self._platform:
            self._platform = loaded.platform
            changed = list((self._tenants | {state.tenant.tenant_id: state for state in changed}).values())
        for state in changed:
            old = self._tenants.get(state.tenant.tenant_id)
            for public_id in old.entries if old is not None else ():
                self._entries.pop(public_id, None)
            for public_id, entry in state.entries.items():
                principal = replace(entry.principal, limits=entry.principal.limits + self._platform)
                whole = replace(entry, principal=principal)
                self._entries[public_id] = self._by_key[principal.key_id] = whole
            self._tenants[state.tenant.tenant_id] = state
        if loaded.aliases is not None:
            self.aliases = loaded.aliases
        if loaded.prices is not None:
            self._prices = loaded.prices
        self._revision = loaded.revision

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._poll_interval_s)
            # `stale_s` grows while this fails, and `authenticate` decides what that means.
            with suppress(DatabaseUnavailable, PepperMismatch):
                await self.refresh()
            polled, self._polled = self._polled, asyncio.Event()
            polled.set()


def _load(connection: Connection, since: int, prices_version: int) -> _Loaded:
    """Changes after revision `since`, from one snapshot."""
    revision = queries.revision(connection)
    pepper = queries.setting(connection, PEPPER_SETTING)
    if revision == since:
        return _Loaded(revision, pepper)
    if revision < since:
        # The database was replaced by an older one (a restored backup): the loaded state may be wrong.
        since = -1
    changed = queries.tenants_where(connection, tables.tenants.c.revision > since)
    ids = [tenant.tenant_id for tenant in changed]
    projects = {project.project_id: project for project in queries.projects_of(connection, ids)}
    keys = {key.key_id: key for key in queries.keys_of(connection, ids)}
    limits: dict[str, list[Limit]] = {tenant_id: [] for tenant_id in ids}
    for limit in queries.limits_of(connection, ids):
        limits[limit.tenant_id].append(limit)
    by_tenant = {tenant.tenant_id: tenant for tenant in changed}
    entries: dict[str, dict[str, _Entry]] = {tenant_id: {} for tenant_id in ids}
    indexed = {tenant_id: _by_subject(limits[tenant_id]) for tenant_id in ids}
    for secret in queries.secrets_of(connection, list(keys)):
        key = keys[secret.key_id]
        entries[key.tenant_id][secret.public_id] = _entry(
            by_tenant[key.tenant_id], projects[key.project_id], key, secret, indexed[key.tenant_id]
        )
    states = [
        _TenantState(tenant, tuple(limits[tenant.tenant_id]), entries[tenant.tenant_id]) for tenant in changed
    ]
    has_other_prices = since < 0 or queries.price_version(connection) != prices_version
    prices = queries.price_book(connection) if has_other_prices else None
    platform = tuple(queries.platform_limits(connection))
    aliases = queries.aliases_of_models(connection)
    return _Loaded(revision, pepper, prices, platform, aliases, since < 0, states)


Subject = tuple[SubjectKind, str]


def _by_subject(limits: list[Limit]) -> dict[Subject, list[Limit]]:
    by_subject: dict[Subject, list[Limit]] = {}
    for limit in limits:
        by_subject.setdefault((limit.kind, limit.subject_id), []).append(limit)
    return by_subject


def _entry(
    tenant: Tenant, project: Project, key: ApiKey, secret: queries.Secret, limits: dict[Subject, list[Limit]]
) -> _Entry:
    refusal: KeyReason | None = None
    if key.revoked_at is not None:
        refusal = "revoked"
    elif tenant.status != "active":
        refusal = "tenant_suspended"
    elif project.status != "active":
        refusal = "project_suspended"
    ends = [
        at
        for at in (secret.expires_us, None if key.expires_at is None else to_us(key.expires_at))
        if at is not None
    ]
    tiers = tenant.tiers if key.tiers is None else key.tiers & tenant.tiers
    models = tenant.models if key.models is None else key.models
    if tenant.models is not None and key.models is not None:
        models = key.models & tenant.models
    if not tiers:
        refusal = refusal or "no_tier"
    path: list[Subject] = [
        (SubjectKind.KEY, key.key_id),
        (SubjectKind.PROJECT, key.project_id),
        (SubjectKind.TENANT, key.tenant_id),
    ]
    of_path = [limit for subject in path for limit in limits.get(subject, ())]
    of_users = [
        limit for (kind, _), owned in limits.items() if kind is SubjectKind.END_USER for limit in owned
    ]
    principal = Principal(
        tenant_id=tenant.tenant_id,
        tenant_name=tenant.name,
        project_id=key.project_id,
        key_id=key.key_id,
        key_prefix=f"fg_live_{secret.public_id}",
        weight=tenant.weight,
        scopes=key.scopes,
        default_tier=_default_tier(tenant, key, tiers),
        tiers=tiers,
        models=models,
        limits=(*of_path, *of_users),
        on_low_budget=tenant.on_low_budget,
        reserved_tokens_per_s=tenant.reserved_tokens_per_s,
        reserved_tier=tenant.reserved_tier,
        allow_from=key.allow_from,
        labels=tenant.labels,
    )
    return _Entry(
        secret.digest,
        refusal,
        min(ends, default=None),
        None if key.expires_at is None else to_us(key.expires_at),
        key.ends_running or tenant.ends_running or project.ends_running,
        principal,
    )


def _default_tier(tenant: Tenant, key: ApiKey, tiers: frozenset[Tier]) -> Tier:
    for tier in (key.default_tier, tenant.default_tier):
        if tier is not None and tier in tiers:
            return tier
    # Neither default is allowed any more: the lowest allowed tier, which takes no service from others.
    return next((tier for tier in reversed(Tier) if tier in tiers), tenant.default_tier)
