"""Rows of limits, keys and usage as pages show them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.console.pages.tenant_parts.key_rows import row_of as key_row
from gateway.console.pages.tenant_parts.limit_rows import binding, row_of
from gateway.console.pages.tenant_parts.tenant_form import LABELS, differences, stored_in_form
from gateway.console.pages.tenants.tenant import fair_hours, usage_lines
from tenants.admin.lists.key_hygiene import KeyFinding, findings_of
from tenants.counts.minute_store import HOUR_US, FlowKey, FlowMinute
from tenants.nouns.tenant import TenantCreate, new_tenant
from tenants.quota.projection import Exhaustion
from tenants.resources.records.minutes import FlowRow
from tenants.types import Meter, Override, Window
from tenants.usage.sums import AMOUNTS
from tests.support.quota import limit
from tests.unit.gateway.console.tenant_parts.test_key_path import KEY

NOW_US = 1_000_000_000_000_000
USE = {"used": 30, "held": 5, "remaining": 65, "reset_s": 60.0, "binds_first": True}


def test_a_row_shows_what_is_in_force_and_what_is_set() -> None:
    override = Override(200, None, NOW_US + 1, "launch")
    overridden = replace(limit(Meter.REQUESTS, 100, window=Window.DAY), override=override)
    row = row_of(overridden, NOW_US, USE, Exhaustion(10.0, 20.0, "why"), "acme")
    assert (row.amount, row.set_words, row.reason) == (200, "100", "launch")
    assert row.used_words == "30 of 200 used, 5 held by running requests"
    assert (row.used_up_us, row.used_up_late_us) == (NOW_US + 10_000_000, NOW_US + 20_000_000)
    assert row.resets_us is not None
    assert row.resets_us > NOW_US
    assert row.resets_us % 86_400_000_000 == 0, "midnight, whenever the counter was read"
    assert binding([row]) is row
    hidden = row_of(overridden, NOW_US, USE, None, "acme", shows_reasons=False)
    assert (hidden.amount, hidden.reason) == (200, "")
    over = row_of(overridden, NOW_US + 1, USE, None, "acme")
    assert (over.amount, over.set_words, over.overridden_until_us) == (100, "", None)


def test_a_counter_that_is_not_known_is_no_zero() -> None:
    row = row_of(limit(), NOW_US, None, None, "acme")
    assert (row.used, row.binds_first) == (None, False)
    assert "not known" in row.used_words
    users = row_of(limit(), NOW_US, {"end_users": 3, "most_end_users": 9}, None, "acme")
    assert (users.used, users.used_words) == (None, "3 end users have counters of their own")


def test_what_deserves_a_look_about_a_key() -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    ends = replace(KEY, expires_at=now + timedelta(days=15))
    assert findings_of(ends, now, True, now) == ()
    assert findings_of(KEY, None, False, now) == (
        KeyFinding.NEVER_USED,
        KeyFinding.NO_EXPIRY,
        KeyFinding.NO_LIMIT,
    )
    soon = replace(KEY, expires_at=now + timedelta(days=13))
    assert findings_of(soon, now - timedelta(days=31), True, now) == (KeyFinding.IDLE, KeyFinding.EXPIRING)
    for gone in (replace(KEY, revoked_at=now), replace(KEY, expires_at=now)):
        assert findings_of(gone, None, False, now) == ()
    row = key_row(KEY, None, [], now, tenant="acme", project=None)
    assert (row["tenant"], row["project"], row["state"]) == ("acme", "prj_1", "active")
    assert row["findings"] == ["never used", "no limit"]


def test_both_states_of_a_tenant_are_told_apart_field_by_field() -> None:
    stored = stored_in_form(new_tenant(TenantCreate(name="a")))
    assert differences(LABELS, stored, stored) == []
    typed = stored | {"weight": "3", "tier_batch": ""}
    assert differences(LABELS, typed, stored) == [("Weight", "1", "3"), ("Tier batch", "yes", "–")]


def test_usage_is_shown_by_size() -> None:
    amounts = dict.fromkeys(AMOUNTS, 0)
    rows: list[dict[str, Any]] = [
        {"key_id": "key_1", "key_name": "small", **amounts, "input_tokens": 1},
        {"key_id": "key_2", "key_name": None, **amounts, "output_tokens": 9},
        {"key_id": None, "key_name": None, **amounts},
    ]
    found = usage_lines(rows, "key_id", "key_name")
    assert [(name, reference) for name, reference, _ in found] == [
        ("key_2", "key_2"),
        ("small", "key_1"),
        ("–", ""),
    ]


def test_service_is_added_up_over_pools_and_tiers() -> None:
    rows = [
        FlowRow(FlowKey(hour * HOUR_US, pool, tier, "ten_a"), FlowMinute(*amounts), HOUR_US)
        for hour, pool, tier, amounts in (
            (2, "m", "batch", (10, 20)),
            (2, "n", "batch", (1, 2)),
            (2, "m", "standard", (100, 200)),
            (1, "m", "batch", (7, 7)),
        )
    ]
    assert fair_hours(rows) == [(HOUR_US, 7, 7), (2 * HOUR_US, 111, 222)]
