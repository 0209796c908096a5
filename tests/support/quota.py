"""Limits and clocks that the quota suites share."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings

from tenants.quota.store import Hold, QuotaStore
from tenants.types import PLATFORM, Amounts, Limit, LimitMode, Meter, SubjectKind, Tier, Window

#: A Thursday, 12:00:20 UTC.
NOON_S = 1_700_136_020.0


class Clock:
    """Virtual time, seconds since 1970."""

    def __init__(self, now_s: float = NOON_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def limit(
    meter: Meter = Meter.TOTAL_TOKENS,
    amount: int = 100,
    *,
    window: Window | None = None,
    rate_per_s: float | None = None,
    mode: LimitMode = LimitMode.HARD,
    tier: Tier | None = None,
    tenant_id: str = "ten_a",
    kind: SubjectKind = SubjectKind.TENANT,
    subject_id: str | None = None,
    time_zone: str = "UTC",
    model: str | None = None,
    above_tokens: int = 0,
    ceiling_per_s: float | None = None,
) -> Limit:
    """A limit; a lifetime window where no shape is given."""
    if window is None and rate_per_s is None and meter is not Meter.CONCURRENCY:
        window = Window.LIFETIME
    return Limit(
        limit_id="lim_test", tenant_id=tenant_id, kind=kind, subject_id=subject_id or tenant_id,
        meter=meter, amount=amount, window=window, time_zone=time_zone, rate_per_s=rate_per_s, mode=mode,
        tier=tier, model=model, above_tokens=above_tokens, ceiling_per_s=ceiling_per_s,
    )  # fmt: skip


def on_platform(meter: Meter = Meter.TOTAL_TOKENS, amount: int = 100, **shape: Any) -> Limit:
    """A limit on all tenants together."""
    return limit(meter, amount, tenant_id=PLATFORM, kind=SubjectKind.PLATFORM, **shape)


def on_user(user: str, meter: Meter = Meter.TOTAL_TOKENS, amount: int = 100, **shape: Any) -> Limit:
    """A limit on one end user of a tenant."""
    return limit(meter, amount, kind=SubjectKind.END_USER, subject_id=f"usr_{user}", **shape)


async def filled(store: QuotaStore, epoch: str = "first") -> None:
    """Makes a new store ready: there is nothing that it could have lost."""
    assert await store.begin_rebuild("test", 60)
    await store.finish_rebuild("test", epoch)


def whole(count: int) -> Hold:
    """A hold of so many output tokens, at once."""
    return Hold.whole(Amounts(output_tokens=count))


def stepwise(first: int, ahead: int, most: int, *, may_be_cut: bool = False) -> Hold:
    """A hold of output tokens that grows."""
    return Hold(*(Amounts(output_tokens=count) for count in (first, ahead, most)), may_be_cut=may_be_cut)


def histories(sequences: int, steps: int) -> settings:
    """How a state machine over both stores is run: always the same histories, short enough to be read as
    they are (to shrink them takes minutes)."""
    return settings(
        max_examples=sequences, stateful_step_count=steps, deadline=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate,), database=None,
    )  # fmt: skip
