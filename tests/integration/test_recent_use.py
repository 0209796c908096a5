"""What a tenant's limit was used in the last hour or two, for when it will be used up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.routes.views.exhaustion_view import exhaustion_of, recent_use
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.errors import DatabaseUnavailable
from tenants.nouns.key import KeyCreate
from tenants.nouns.tenant import TenantCreate
from tenants.quota.projection import ObservedUse
from tenants.quota.store import LimitState
from tenants.storage.database import Database
from tenants.types import Limit, Meter, SubjectKind, Tier, Window
from tests.support.usage import MONDAY_US, fold_all, row, write

HOUR_US = 3_600_000_000
NOW_US = MONDAY_US + 10 * HOUR_US + HOUR_US // 2
"""Half past ten: the hour before began one and a half hours ago."""
KINDS = SubjectKind


def limit_of(tenant_id: str, meter: Meter, kind: SubjectKind = SubjectKind.TENANT, **fields: Any) -> Limit:
    shape: dict[str, Any] = {"window": Window.DAY, "created_us": 1} | fields
    return Limit("lim_1", tenant_id, kind, tenant_id, meter, 1_000, **shape)


@pytest.fixture
async def used(database: Database, pepper: bytes) -> tuple[Admin, str]:
    """A tenant with charges at 8:59, 9:00, 10:15 (folded) and 10:29 (not folded yet)."""
    admin = Admin(Transactions(database, pepper, lambda: NOW_US / 1e6))
    tenant = await admin.tenants.create("cli", TenantCreate(name="acme"))
    other = await admin.tenants.create("cli", TenantCreate(name="other"))
    at_minutes = {"before": 8 * 60 + 59, "first": 9 * 60, "second": 10 * 60 + 15}
    owned: dict[str, Any] = {"tenant_id": tenant.tenant_id}
    rows = [row(name, at_us=MONDAY_US + at * 60_000_000, **owned) for name, at in at_minutes.items()]
    await write(database, [*rows, row("theirs", at_us=NOW_US - 1, tenant_id=other.tenant_id)])
    await fold_all(database)
    late = {"at_us": NOW_US - 60_000_000, "model": "large", "tier": "batch"}
    await write(database, [row("third", **owned, **late)])
    return admin, tenant.tenant_id


@pytest.mark.parametrize(
    ("meter", "each"),
    [
        (Meter.REQUESTS, 1),
        (Meter.INPUT_TOKENS, 10),
        (Meter.OUTPUT_TOKENS, 20),
        (Meter.TOTAL_TOKENS, 30),
        (Meter.COST_NANOUSD, 3_000),
        (Meter.GPU_MS, 7),
    ],
)
async def test_use_of_this_hour_and_the_one_before_counts_as_the_limit_does(
    used: tuple[Admin, str], meter: Meter, each: int
) -> None:
    admin, tenant_id = used
    [found] = await recent_use(admin, limit_of(tenant_id, meter), NOW_US)
    assert (found.amount, found.requests, found.seconds) == (3 * each, 3, 5_400.0)


async def test_a_limit_of_a_tier_or_a_model_sees_its_own_use(used: tuple[Admin, str]) -> None:
    admin, tenant_id = used
    for narrow, requests in (({"tier": Tier.BATCH}, 1), ({"model": "small"}, 2), ({"model": "none"}, 0)):
        fields: dict[str, Any] = dict(narrow)
        [found] = await recent_use(admin, limit_of(tenant_id, Meter.REQUESTS, **fields), NOW_US)
        assert found.amount == requests


async def test_what_was_given_back_of_an_earlier_hour_is_no_use(
    used: tuple[Admin, str], database: Database, pepper: bytes
) -> None:
    _, tenant_id = used
    given_back: dict[str, Any] = {"input_tokens": 0, "output_tokens": 0, "cost_nanousd": 0, "gpu_ms": -9}
    later_us = NOW_US + 3 * HOUR_US
    admin = Admin(Transactions(database, pepper, lambda: later_us / 1e6))
    adjusted = row(
        "third", "adjust", tenant_id=tenant_id, at_us=later_us - 60_000_000, requests=-1, **given_back
    )
    await write(database, [adjusted])
    for meter in (Meter.TOTAL_TOKENS, Meter.REQUESTS, Meter.GPU_MS):
        limit = limit_of(tenant_id, meter)
        [found] = recent = await recent_use(admin, limit, later_us)
        assert (found.amount, found.requests) == (0, 0)
        shown = exhaustion_of(LimitState(limit, 120, 0, 880, 9 * 3_600), later_us, recent)
        assert "this hour and the one before" in shown["basis"]
        assert shown["p90"] is None


async def test_a_limit_of_a_key_or_a_project_sees_its_own_use_of_two_days(
    used: tuple[Admin, str], database: Database
) -> None:
    admin, tenant_id = used
    key, _ = await admin.keys.create("cli", KeyCreate(tenant=tenant_id))
    other, _ = await admin.keys.create("cli", KeyCreate(tenant=tenant_id))
    owned = {"tenant_id": tenant_id, "project_id": key.project_id}
    day_us = 24 * HOUR_US
    for name, at_us, used_by in (
        ("two days ago", MONDAY_US - day_us - 1, key),
        ("yesterday", MONDAY_US - day_us, key),
        ("today", NOW_US - 1, key),
        ("another's", NOW_US - 1, other),
    ):
        await write(database, [row(name, at_us=at_us, key_id=used_by.key_id, **owned)])
        if name == "yesterday":
            await fold_all(database)

    async def seen(kind: SubjectKind, subject_id: str, **fields: Any) -> list[ObservedUse]:
        limit = replace(limit_of(tenant_id, Meter.TOTAL_TOKENS, kind, **fields), subject_id=subject_id)
        return await recent_use(admin, limit, NOW_US)

    two_days = "today and the day before (UTC)"
    passed_s = 34.5 * 3_600
    for window in (Window.DAY, Window.MONTH, Window.LIFETIME):
        [found] = await seen(KINDS.KEY, key.key_id, window=window)
        assert found == ObservedUse(two_days, 60, passed_s, 2)
        [found] = await seen(KINDS.PROJECT, key.project_id, window=window)
        assert found == ObservedUse(two_days, 90, passed_s, 3)
    [found] = await seen(KINDS.KEY, key.key_id, window=Window.MONTH, model="none")
    assert found.amount == 0
    assert await seen(KINDS.KEY, key.key_id, window=Window.HOUR) == []
    # The counter of a limit that is younger has all that those days would say of it.
    assert await seen(KINDS.KEY, key.key_id, window=Window.MONTH, created_us=MONDAY_US) == []


async def test_what_is_not_kept_is_not_guessed(used: tuple[Admin, str]) -> None:
    admin, tenant_id = used
    unknown = [
        limit_of(tenant_id, Meter.REQUESTS, KINDS.END_USER),
        limit_of(tenant_id, Meter.REQUESTS, KINDS.KEY, window=Window.MINUTE),
        limit_of(tenant_id, Meter.REQUESTS, KINDS.PROJECT, above_tokens=100),
        limit_of(tenant_id, Meter.REQUESTS, above_tokens=100),
        limit_of(tenant_id, Meter.REQUESTS, window=None, rate_per_s=1.0),
        limit_of(tenant_id, Meter.CONCURRENCY, window=None),
    ]
    for limit in unknown:
        assert await recent_use(admin, limit, NOW_US) == []


async def test_the_projection_uses_both_and_goes_on_without_the_database(
    used: tuple[Admin, str], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, tenant_id = used
    limit = limit_of(tenant_id, Meter.REQUESTS)
    state = LimitState(limit, 4, 0, 996, 13.5 * 3_600)
    shown = exhaustion_of(state, NOW_US, await recent_use(admin, limit, NOW_US))
    assert "this window so far (10.5 hours)" in shown["basis"]
    assert "this hour and the one before (90 minutes)" in shown["basis"]
    assert shown["basis"].endswith("not before the window turns")

    async def away(*_: Any) -> Any:
        raise DatabaseUnavailable("it is away")

    monkeypatch.setattr(database, "read", away)
    assert await recent_use(admin, limit, NOW_US) == []
