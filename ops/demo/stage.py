"""Creates the demo's tenants, keys and limits in the database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ops.demo.cast import CAST
from ops.demo.turns import WEIGHTS
from ops.serving import datadir
from ops.settings.settings import Settings
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.transaction import Transactions
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.tenant import TenantCreate
from tenants.storage.database import open_database
from tenants.types import Meter, Tier

ACTOR = Actor("demo", "demo")
VISITOR = "visitor"
MIN_LIMIT_TOKENS = 1000
"""A smaller budget would not let a single request through: each holds its longest answer."""
T = TypeVar("T")


@dataclass(frozen=True)
class DemoTenants:
    """Keys, tiers and weights by tenant name, and names by tenant id."""

    keys: Mapping[str, str]
    names: Mapping[str, str]
    ids: Mapping[str, str]
    """Tenant ids by name; the two tenants of `turns.py`, which take no part in the replay, among them."""
    tiers: Mapping[str, str]
    weights: Mapping[str, float]
    visitor_key: str


async def set_stage(data_dir: Path, model: str) -> DemoTenants:
    async def act(admin: Admin) -> DemoTenants:
        keys, ids = {}, {}
        wanted = [TenantCreate(name=one.name, weight=one.weight, tier=one.tier) for one in CAST]
        wanted += [TenantCreate(name=name, weight=weight) for name, weight in WEIGHTS.items()]
        for tenant in wanted:
            ids[tenant.name] = (await admin.tenants.create(ACTOR, tenant)).tenant_id
            _, keys[tenant.name] = await admin.keys.create(
                ACTOR, KeyCreate(tenant=tenant.name, models=[model])
            )
        await admin.tenants.create(ACTOR, TenantCreate(name=VISITOR, tier=Tier.INTERACTIVE))
        _, visitor_key = await admin.keys.create(ACTOR, KeyCreate(tenant=VISITOR))
        return DemoTenants(
            keys=keys,
            names={ids[tenant.name]: tenant.name for tenant in CAST},
            ids=ids,
            tiers={tenant.name: tenant.tier.value for tenant in CAST},
            weights={tenant.name: tenant.weight for tenant in CAST},
            visitor_key=visitor_key,
        )

    return await _administer(data_dir, act)


async def set_limits(data_dir: Path, planned_tokens: Mapping[str, int]) -> None:
    async def act(admin: Admin) -> None:
        for tenant in CAST:
            if tenant.limit is None:
                continue
            tokens = round(planned_tokens[tenant.name] * tenant.limit.share_of_planned)
            await admin.limits.set(
                ACTOR,
                LimitSet(
                    tenant=tenant.name,
                    meter=Meter.TOTAL_TOKENS,
                    window=tenant.limit.window,
                    amount=max(MIN_LIMIT_TOKENS, tokens),
                    mode=tenant.limit.mode,
                ),
            )

    await _administer(data_dir, act)


async def _administer(data_dir: Path, act: Callable[[Admin], Awaitable[T]]) -> T:
    """Works on the database beside the running server, as the command line does."""
    settings = Settings(data_dir=data_dir)
    database = open_database(settings.resolved_database_url)
    try:
        return await act(Admin(Transactions(database, datadir.pepper(settings))))
    finally:
        await database.close()
