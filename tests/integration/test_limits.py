"""Limits change without losing their use; overrides end on time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tenants.admin import limits
from tenants.admin.admin import Admin
from tenants.directory.directory import Directory
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitOverride, LimitSet
from tenants.nouns.tenant import TenantChange, TenantCreate
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Denied, Granted, Hold
from tenants.types import (
    DEFAULT_THRESHOLDS,
    Amounts,
    Limit,
    LimitMode,
    Meter,
    OnLowBudget,
    Override,
    RequestTraits,
    SubjectKind,
    Tier,
    end_user_id,
)
from tests.support.audited import audited
from tests.support.limits import limits_of
from tests.support.quota import NOON_S, Clock

ACTOR = "cli:tester"
STANDARD = RequestTraits(Tier.STANDARD, "m", 10)
DAILY: dict[str, Any] = {"meter": "output_tokens", "window": "day"}


@pytest.fixture
async def admin(admin: Admin) -> Admin:
    await admin.tenants.create(ACTOR, TenantCreate(name="acme"))
    return admin


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


async def use(store: MemoryQuotaStore, request_id: str, limit: Limit, count: int) -> Granted | Denied:
    """Holds and settles `count` output tokens."""
    hold = Hold(tokens(count), tokens(count), tokens(count))
    answer = await store.reserve(request_id, [limit], hold, 30)
    if isinstance(answer, Granted):
        await store.settle(request_id, tokens(count))
    return answer


# ---------------------------------------------------------------- overrides


async def test_an_override_ends_by_itself_though_nothing_is_loaded_again(
    admin: Admin, directory: Directory, clock: Clock
) -> None:
    await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="requests", window="day", amount=5, tier="batch")
    )
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    made = await admin.limits.override(
        ACTOR, limit.limit_id, LimitOverride(amount=250, for_s=60, reason="launch day")
    )
    assert made.override == Override(250, None, round((NOON_S + 60) * 1e6), "launch day")
    await directory.refresh()
    await directory.close()
    principal = directory.authenticate(secret, NOON_S)

    def amounts(now_s: float) -> list[int]:
        in_force = principal.limits_for(STANDARD, now_s)
        assert in_force == tuple(each for each in directory.limits(now_s) if each.tier is None)
        return [each.amount for each in in_force]

    assert amounts(NOON_S) == [250]
    assert amounts(NOON_S + 59.999) == [250]
    assert amounts(NOON_S + 60) == [100]
    clock.advance(59)
    assert (await admin.limits.show(limit.limit_id)).as_json()["in_force"]["amount"] == 250
    clock.advance(1)
    shown = await admin.limits.show(limit.limit_id)
    assert (shown.is_overridden, shown.as_json()["in_force"]["amount"], shown.limit.amount) == (
        False,
        100,
        100,
    )


async def test_a_request_sees_the_override_and_then_not(admin: Admin, clock: Clock) -> None:
    store = MemoryQuotaStore(clock)
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    limit = await admin.limits.override(
        ACTOR, limit.limit_id, LimitOverride(amount=250, for_s=60, reason="launch")
    )
    assert isinstance(await use(store, "a", limit.at(clock()), 120), Granted)
    clock.advance(60)
    refused = await use(store, "b", limit.at(clock()), 1)
    assert isinstance(refused, Denied)
    assert (refused.limit.amount, refused.available) == (100, 0)
    [state] = await store.states([limit.at(clock())])
    assert state.used == 120, "what was used under the override stays used"


async def test_a_buckets_override_may_change_its_rate(admin: Admin) -> None:
    bucket = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="output_tokens", rate_per_s=10, amount=20)
    )
    faster = await admin.limits.override(
        ACTOR, bucket.limit_id, LimitOverride(amount=40, rate_per_s=0.5, for_s=9, reason="r")
    )
    assert (faster.at(NOON_S).rate_per_s, faster.at(NOON_S).amount) == (0.5, 40)
    assert faster.at(NOON_S).is_bucket
    assert faster.at(NOON_S + 9) == bucket
    larger = await admin.limits.override(
        ACTOR, bucket.limit_id, LimitOverride(amount=41, for_s=9, reason="r")
    )
    assert (larger.at(NOON_S).rate_per_s, larger.at(NOON_S).amount) == (10, 41)


async def test_until_an_instant_in_another_zone(admin: Admin) -> None:
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    wanted = LimitOverride(amount=1, until="2023-11-16T14:00:00+01:00", reason="r")
    made = await admin.limits.override(ACTOR, limit.limit_id, wanted)
    assert made.override is not None
    assert from_us(made.override.until_us) == datetime(2023, 11, 16, 13, tzinfo=UTC)


async def test_a_limit_has_one_override_and_every_act_on_it_is_audited(admin: Admin) -> None:
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    await admin.limits.override(ACTOR, limit.limit_id, LimitOverride(amount=250, for_s=60, reason="first"))
    await admin.limits.override(ACTOR, limit.limit_id, LimitOverride(amount=300, for_s=60, reason="second"))
    changed = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=110, **DAILY))
    assert changed.override is not None, "setting the limit leaves its override in force"
    assert (changed.amount, changed.at(NOON_S).amount) == (110, 300)
    cleared = await admin.limits.clear_override(ACTOR, limit.limit_id)
    assert cleared.override is None
    with pytest.raises(NotFound, match="override"):
        await admin.limits.clear_override(ACTOR, limit.limit_id)
    rows = [row for row in await audited(admin, tenant="acme") if row.action.startswith("limit.")]

    def reason(side: dict[str, Any] | None) -> str | None:
        return side["override"]["reason"] if side and side["override"] else None

    assert [(row.action, reason(row.before), reason(row.after)) for row in rows] == [
        ("limit.set", None, None),
        ("limit.override", None, "first"),
        ("limit.override", "first", "second"),
        ("limit.set", "second", "second"),
        ("limit.clear_override", "second", None),
    ]
    await admin.limits.override(ACTOR, limit.limit_id, LimitOverride(amount=1, for_s=60, reason="again"))
    await admin.limits.remove(ACTOR, limit.limit_id)
    assert (await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))).override is None


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("until", {"until": datetime.fromtimestamp(NOON_S, UTC).isoformat()}),
        ("until", {"until": (datetime.fromtimestamp(NOON_S, UTC) - timedelta(days=1)).isoformat()}),
        ("until", {"until": (datetime.fromtimestamp(NOON_S, UTC) + timedelta(days=367)).isoformat()}),
        ("until", {}),
        ("until", {"until": datetime.fromtimestamp(NOON_S + 9, UTC).isoformat(), "for_s": 9}),
        ("for_s", {"for_s": 0}),
        ("for_s", {"for_s": -5}),
        ("for_s", {"for_s": 367 * 86_400}),
        ("for_s", {"for_s": float("nan")}),
        ("amount", {"for_s": 9, "amount": -1}),
        ("amount", {"for_s": 9, "amount": 10**16}),
        ("amount", {"for_s": 9, "amount": 1.5}),
        ("rate_per_s", {"for_s": 9, "rate_per_s": 2.0}),
        ("reason", {"for_s": 9, "reason": "  "}),
        ("reason", {"for_s": 9, "reason": "x" * 201}),
    ],
)
async def test_an_override_that_makes_no_sense_names_its_field_and_changes_nothing(
    admin: Admin, field: str, arguments: dict[str, Any]
) -> None:
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    before = len(await audited(admin))
    with pytest.raises(Invalid) as caught:
        await admin.limits.override(
            ACTOR, limit.limit_id, LimitOverride(**{"amount": 1, "reason": "r", **arguments})
        )
    assert caught.value.field == field
    assert await limits_of(admin) == [limit]
    assert len(await audited(admin)) == before


async def test_an_override_fits_the_shape_of_its_limit(admin: Admin) -> None:
    bucket = await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", rate_per_s=1, amount=5))
    running = await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="concurrency", amount=5))
    for limit, field, arguments in (
        (bucket, "amount", {"amount": 0}),
        (bucket, "rate_per_s", {"amount": 5, "rate_per_s": 0.0001}),
        (bucket, "rate_per_s", {"amount": 5, "rate_per_s": -1}),
        (bucket, "rate_per_s", {"amount": 9_000_000_000}),  # would take 285 years to fill
        (running, "amount", {"amount": 1_000_001}),
        (running, "rate_per_s", {"amount": 5, "rate_per_s": 1.0}),
    ):
        with pytest.raises(Invalid) as caught:
            await admin.limits.override(
                ACTOR, limit.limit_id, LimitOverride(for_s=9, reason="r", **arguments)
            )
        assert caught.value.field == field
    assert (
        await admin.limits.override(ACTOR, running.limit_id, LimitOverride(amount=0, for_s=9, reason="r"))
    ).at(NOON_S).amount == 0
    # The rate that an override relies on cannot be taken away below it.
    await admin.limits.override(ACTOR, bucket.limit_id, LimitOverride(amount=2_000_000, for_s=9, reason="r"))
    with pytest.raises(Invalid, match="31 days"):
        await admin.limits.set(ACTOR, LimitSet(tenant="acme", meter="requests", rate_per_s=0.5, amount=5))


@pytest.mark.parametrize(
    "text", ["", "soon", "2026-01-31", "2026-01-31T18:00:00", "9999-12-31T23:59:59-12:00"]
)
def test_an_instant_needs_a_time_zone(text: str) -> None:
    with pytest.raises(Invalid, match=r"until.*time zone"):
        checks.instant("until", text)


async def test_nobody_overrides_through_another_tenant(admin: Admin) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="globex"))
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    await admin.limits.override(
        ACTOR, limit.limit_id, LimitOverride(amount=1, for_s=9, reason="r"), tenant="acme"
    )
    with pytest.raises(NotFound):
        await admin.limits.override(
            ACTOR, limit.limit_id, LimitOverride(amount=9, for_s=9, reason="r"), tenant="globex"
        )
    with pytest.raises(NotFound):
        await admin.limits.clear_override(ACTOR, limit.limit_id, tenant="globex")
    with pytest.raises(NotFound):
        await admin.limits.show("lim_unknown")
    assert (await admin.limits.show(limit.limit_id)).is_overridden


# ---------------------------------------------------------------- usage stays


async def test_no_change_of_a_limit_wipes_what_was_used(admin: Admin, clock: Clock) -> None:
    store = MemoryQuotaStore(clock)
    limit = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    assert isinstance(await use(store, "r", limit.at(clock()), 40), Granted)

    async def used(changed: Limit) -> tuple[int, int]:
        [state] = await store.states([changed.at(clock())])
        return state.used, state.available

    set_again = admin.limits.set
    assert await used(await set_again(ACTOR, LimitSet(tenant="acme", amount=50, **DAILY))) == (40, 10)
    assert await used(await set_again(ACTOR, LimitSet(tenant="acme", amount=10, **DAILY))) == (40, 0)
    assert await used(await set_again(ACTOR, LimitSet(tenant="acme", amount=100, mode="soft", **DAILY))) == (
        40,
        60,
    )
    alerting = await set_again(
        ACTOR, LimitSet(tenant="acme", amount=100, mode="soft", thresholds=[5], **DAILY)
    )
    assert await used(alerting) == (40, 60)
    await set_again(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    overridden = await admin.limits.override(
        ACTOR, limit.limit_id, LimitOverride(amount=70, for_s=60, reason="r")
    )
    assert await used(overridden) == (40, 30)
    clock.advance(60)
    assert await used(overridden) == (40, 60)
    assert await used(await admin.limits.clear_override(ACTOR, limit.limit_id)) == (40, 60)
    await admin.limits.remove(ACTOR, limit.limit_id)
    assert await used(await set_again(ACTOR, LimitSet(tenant="acme", amount=200, **DAILY))) == (40, 160)


async def test_the_zone_of_a_window_cannot_be_changed_in_place(admin: Admin) -> None:
    limit = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", amount=100, time_zone="Europe/Berlin", **DAILY)
    )
    with pytest.raises(Invalid, match=f"Europe/Berlin.*remove {limit.limit_id}") as caught:
        await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, time_zone="Asia/Tokyo", **DAILY))
    assert caught.value.field == "time_zone"
    await admin.limits.remove(ACTOR, limit.limit_id)
    moved = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", amount=100, time_zone="Asia/Tokyo", **DAILY)
    )
    assert moved.time_zone == "Asia/Tokyo"
    # A bucket has no days that could begin elsewhere.
    for zone in ("UTC", "Asia/Tokyo"):
        await admin.limits.set(
            ACTOR, LimitSet(tenant="acme", meter="requests", rate_per_s=1, amount=5, time_zone=zone)
        )


# ---------------------------------------------------------------- soft, shadow, none


async def test_thresholds_belong_to_soft_limits(admin: Admin) -> None:
    soft = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, mode="soft", **DAILY))
    assert (soft.mode, soft.thresholds) == (LimitMode.SOFT, DEFAULT_THRESHOLDS)
    chosen = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", amount=100, mode="soft", thresholds=[150, 50, 50], **DAILY)
    )
    assert chosen.thresholds == (50, 150)
    for mode in ("hard", "shadow"):
        assert (
            await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, mode=mode, **DAILY))
        ).thresholds == ()
    bad: list[tuple[str, list[Any]]] = [
        ("soft", []), ("soft", [0]), ("soft", [-80]), ("soft", [1_001]), ("soft", [80.5]), ("soft", [True]),
        ("soft", list(range(1, 10))), ("hard", [80]), ("shadow", [80]),
    ]  # fmt: skip
    for mode, thresholds in bad:
        with pytest.raises(Invalid) as caught:
            await admin.limits.set(
                ACTOR, LimitSet(tenant="acme", amount=1, mode=mode, thresholds=thresholds, **DAILY)
            )
        assert caught.value.field == "thresholds", (mode, thresholds)


async def test_a_tenant_without_limits_is_allowed_and_visible_as_such(
    admin: Admin, directory: Directory
) -> None:
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))
    await directory.refresh()
    assert directory.authenticate(secret, NOON_S).limits_for(STANDARD, NOON_S) == ()
    assert (await admin.tenants.show("acme")).as_json()["has_limits"] is False
    await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=100, **DAILY))
    assert (await admin.tenants.show("acme")).as_json()["has_limits"] is True


async def test_device_time_is_a_meter_like_the_others(admin: Admin) -> None:
    limit = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="gpu_ms", window="hour", amount=60_000)
    )
    assert limit.meter is Meter.GPU_MS
    assert Amounts(gpu_ms=7).of(limit.meter) == 7
    bucket = await admin.limits.set(
        ACTOR, LimitSet(tenant="acme", meter="gpu_ms", rate_per_s=100, amount=2_000)
    )
    assert bucket.is_bucket


async def test_what_a_low_budget_does_reaches_the_principal(admin: Admin, directory: Directory) -> None:
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))

    async def choice() -> OnLowBudget:
        await directory.refresh()
        return directory.authenticate(secret, NOON_S).on_low_budget

    assert await choice() is OnLowBudget.REFUSE
    await admin.tenants.update(ACTOR, "acme", TenantChange(on_low_budget="truncate"))
    assert await choice() is OnLowBudget.TRUNCATE
    await admin.tenants.update(ACTOR, "acme", TenantChange(weight=3))
    assert await choice() is OnLowBudget.TRUNCATE
    made = await admin.tenants.create(ACTOR, TenantCreate(name="globex", on_low_budget="truncate"))
    assert made.as_json()["on_low_budget"] == "truncate"
    with pytest.raises(Invalid, match=r"on_low_budget.*refuse, truncate"):
        await admin.tenants.update(ACTOR, "acme", TenantChange(on_low_budget="ignore"))


async def test_a_tenants_reservation_reaches_its_keys(admin: Admin, directory: Directory) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="paying", reserved_tokens_per_s=1500))
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="paying"))

    async def reserved() -> float:
        await directory.refresh()
        return directory.authenticate(secret, NOON_S).reserved_tokens_per_s

    assert await reserved() == 1500.0
    await admin.tenants.update(ACTOR, "paying", TenantChange(weight=3))
    assert await reserved() == 1500.0
    changed = await admin.tenants.update(ACTOR, "paying", TenantChange(reserved_tokens_per_s=0))
    assert changed.as_json()["reserved_tokens_per_s"] == 0.0
    assert await reserved() == 0.0
    with pytest.raises(Invalid, match=r"reserved_tier.*reserved_tokens_per_s above 0"):
        await admin.tenants.update(ACTOR, "paying", TenantChange(reserved_tier="batch"))
    for wrong in (-1, float("nan"), float("inf"), 1e12, True):
        with pytest.raises(Invalid, match="reserved_tokens_per_s"):
            await admin.tenants.update(ACTOR, "paying", TenantChange(reserved_tokens_per_s=wrong))


async def test_a_reservation_for_a_tier_lasts_as_long_as_the_reservation(
    admin: Admin, directory: Directory
) -> None:
    made = await admin.tenants.create(
        ACTOR, TenantCreate(name="paying", reserved_tokens_per_s=1500, reserved_tier="interactive")
    )
    assert made.as_json()["reserved_tier"] == "interactive"
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="paying"))

    async def after(change: TenantChange) -> tuple[float, Tier | None]:
        await admin.tenants.update(ACTOR, "paying", change)
        await directory.refresh()
        principal = directory.authenticate(secret, NOON_S)
        return principal.reserved_tokens_per_s, principal.reserved_tier

    assert await after(TenantChange(reserved_tokens_per_s=9)) == (9.0, Tier.INTERACTIVE), "it stays"
    assert await after(TenantChange(reserved_tier="batch")) == (9.0, Tier.BATCH)
    assert await after(TenantChange(reserved_tier="all")) == (9.0, None)
    assert await after(TenantChange(reserved_tier="batch")) == (9.0, Tier.BATCH)
    assert await after(TenantChange(reserved_tokens_per_s=0)) == (0.0, None)
    assert await after(TenantChange(reserved_tokens_per_s=9)) == (9.0, None), "of all tiers"
    with pytest.raises(Invalid, match=r"reserved_tier.*interactive, standard, batch, all"):
        await admin.tenants.update(ACTOR, "paying", TenantChange(reserved_tier="cheap"))
    with pytest.raises(Invalid, match="reserved_tier"):
        await admin.tenants.update(
            ACTOR, "paying", TenantChange(reserved_tokens_per_s=0, reserved_tier="batch")
        )
    with pytest.raises(Invalid, match="reserved_tier"):
        await admin.tenants.create(ACTOR, TenantCreate(name="other", reserved_tier="batch"))


# ---------------------------------------------------------------- subjects


async def bound(directory: Directory, secret: str, **traits: Any) -> set[str]:
    """The ids of the limits that bind such a request."""
    await directory.refresh()
    asked = RequestTraits(**{"tier": Tier.STANDARD, "model": "m", "tokens": 10} | traits)
    return {limit.limit_id for limit in directory.authenticate(secret, NOON_S).limits_for(asked, NOON_S)}


async def test_a_limit_of_the_platform_binds_every_tenant_from_the_next_refresh_on(
    admin: Admin, directory: Directory
) -> None:
    await admin.tenants.create(ACTOR, TenantCreate(name="globex"))
    secrets = [(await admin.keys.create(ACTOR, KeyCreate(tenant=name)))[1] for name in ("acme", "globex")]
    assert [await bound(directory, secret) for secret in secrets] == [set(), set()]
    shared = await admin.limits.set(ACTOR, LimitSet(platform=True, amount=9, **DAILY))
    assert [await bound(directory, secret) for secret in secrets] == [{shared.limit_id}] * 2
    assert directory.limits(NOON_S, "platform") == [shared]
    own = await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=9, **DAILY))
    assert await bound(directory, secrets[0]) == {own.limit_id, shared.limit_id}
    await admin.limits.override(ACTOR, shared.limit_id, LimitOverride(amount=7, for_s=60, reason="r"))
    await directory.refresh()
    assert directory.authenticate(secrets[1], NOON_S).limits[0].at(NOON_S).amount == 7
    assert await limits_of(admin, "acme") == [own]
    assert {each.limit_id for each in await limits_of(admin)} == {shared.limit_id, own.limit_id}
    await admin.limits.remove(ACTOR, shared.limit_id)
    assert await bound(directory, secrets[1]) == set()
    assert directory.limits(NOON_S) == [own]


async def test_models_long_requests_and_end_users_have_limits_of_their_own(
    admin: Admin, directory: Directory
) -> None:
    _, secret = await admin.keys.create(ACTOR, KeyCreate(tenant="acme"))

    async def put(**fields: Any) -> str:
        made = await admin.limits.set(ACTOR, LimitSet(**{"tenant": "acme", "amount": 9} | DAILY | fields))
        return made.limit_id

    plain, model, other = await put(), await put(model="m"), await put(model="o")
    long, longer = await put(above_tokens=9), await put(above_tokens=10)
    each, amy = await put(each_end_user=True), await put(end_user="amy", amount=5)
    each_batch = await put(each_end_user=True, tier="batch")
    assert len({plain, model, other, long, longer, each, amy, each_batch}) == 8
    assert await bound(directory, secret) == {plain, model, long}
    assert await bound(directory, secret, model="o", tokens=11) == {plain, other, long, longer}
    assert await bound(directory, secret, end_user="bob") == {plain, model, long, each}
    # Her own limit is in the default's place.
    hers = await bound(directory, secret, end_user="amy", tier=Tier.BATCH)
    assert hers == {plain, model, long, amy, each_batch}
    principal = directory.authenticate(secret, NOON_S)
    found = {
        name: next(
            limit
            for limit in principal.limits_for(RequestTraits(Tier.STANDARD, "m", 1, name), NOON_S)
            if limit.kind is SubjectKind.END_USER
        )
        for name in ("amy", "bob")
    }
    assert found["amy"].identity != found["bob"].identity
    assert (found["amy"].amount, found["bob"].amount) == (5, 9)
    assert found["amy"].subject_id == end_user_id(principal.tenant_id, "amy")
    # The same again replaces it.
    assert await put(model="m", amount=3) == model
    assert await put(end_user="amy", amount=6) == amy


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tenant", {}),
        ("platform", {"platform": True, "tenant": "acme"}),
        ("platform", {"platform": True, "end_user": "amy"}),
        ("key", {"tenant": "acme", "project": "default", "key": "key_x"}),
        ("each_end_user", {"tenant": "acme", "end_user": "amy", "each_end_user": True}),
        ("end_user", {"tenant": "acme", "end_user": ""}),
        ("end_user", {"tenant": "acme", "end_user": "a" * 65}),
        ("model", {"tenant": "acme", "model": ""}),
        ("above_tokens", {"tenant": "acme", "above_tokens": -1}),
    ],
)
async def test_a_limit_names_one_subject(admin: Admin, field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        await admin.limits.set(ACTOR, LimitSet(amount=9, **DAILY, **fields))
    assert caught.value.field == field


async def test_the_platform_has_room_for_so_many_limits(
    admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_LIMITS_PER_SUBJECT", 1)
    await admin.limits.set(ACTOR, LimitSet(platform=True, amount=9, **DAILY))
    with pytest.raises(Invalid, match="one platform has at most 1 limits"):
        await admin.limits.set(ACTOR, LimitSet(platform=True, amount=9, model="m", **DAILY))
    await admin.limits.set(ACTOR, LimitSet(tenant="acme", amount=9, **DAILY))
    await admin.limits.set(ACTOR, LimitSet(tenant="acme", each_end_user=True, amount=9, **DAILY))
