"""Forms of limits, as commands; who may set what."""

from __future__ import annotations

import pytest

from gateway.console.pages.tenant_parts.limit_form import (
    act_on,
    kind_of,
    override_of,
    same_with,
    set_of,
    stored_in_form,
)
from tenants.errors import Invalid
from tenants.people.roles import Act
from tenants.types import LimitMode, Meter, SubjectKind, Tier, Window
from tests.support.quota import limit

DAY = {"on": "tenant", "meter": "total_tokens", "amount": "1000", "window": "day", "mode": "hard"}


def test_a_form_is_a_command() -> None:
    wanted = set_of(DAY, "ten_a")
    assert (wanted.tenant, wanted.amount, wanted.window, wanted.rate_per_s) == ("ten_a", 1000, "day", None)
    assert (wanted.project, wanted.key, wanted.end_user, wanted.each_end_user) == (None, None, None, False)
    rate = set_of(DAY | {"window": "rate", "rate_per_s": "2.5", "above_tokens": "4,000"}, "ten_a")
    assert (rate.window, rate.rate_per_s, rate.above_tokens) == (None, 2.5, 4_000)
    at_a_time = set_of(DAY | {"meter": "concurrency"}, "ten_a")
    assert (at_a_time.window, at_a_time.rate_per_s) == (None, None)
    user = set_of(DAY | {"on": "end_user", "subject": " amy "}, "ten_a")
    assert user.end_user == "amy"
    assert set_of(DAY | {"on": "each_end_user"}, "ten_a").each_end_user


@pytest.mark.parametrize("on", ["project", "key", "end_user"])
def test_a_subject_must_be_named(on: str) -> None:
    with pytest.raises(Invalid) as refused:
        set_of(DAY | {"on": on, "subject": " "}, "ten_a")
    assert refused.value.field == "subject"


def test_who_may_limit_what_goes_by_the_subject() -> None:
    assert act_on(kind_of({"on": "tenant"})) is Act.CHANGE_TENANT
    for on in ("project", "key", "end_user", "each_end_user"):
        assert act_on(kind_of({"on": on})) is Act.LIMIT_BELOW_TENANT
    assert act_on(SubjectKind.PLATFORM) is Act.CHANGE_PLATFORM
    with pytest.raises(Invalid):
        kind_of({"on": "platform"})


@pytest.mark.parametrize(
    "stored",
    [
        limit(Meter.COST_NANOUSD, 5_500_000_000, window=Window.MONTH, time_zone="Europe/Berlin"),
        limit(Meter.REQUESTS, 50, rate_per_s=2.5, tier=Tier.BATCH),
        limit(amount=50, rate_per_s=2.5, ceiling_per_s=1_234_567.125, tier=Tier.BATCH),
        limit(Meter.CONCURRENCY, 5, kind=SubjectKind.KEY, subject_id="key_1"),
        limit(kind=SubjectKind.PROJECT, subject_id="prj_1", model="m", above_tokens=9),
        limit(kind=SubjectKind.END_USER),
        limit(mode=LimitMode.SOFT),
    ],
)
def test_a_form_that_is_sent_as_it_was_filled_in_changes_nothing(stored: object) -> None:
    assert isinstance(stored, type(limit()))
    same = same_with(stored, stored_in_form(stored))
    assert (same.amount, same.rate_per_s, same.mode) == (stored.amount, stored.rate_per_s, stored.mode.value)
    assert same.ceiling_per_s == stored.ceiling_per_s
    assert same.window == (stored.window.value if stored.window else None)
    assert (same.meter, same.time_zone) == (stored.meter.value, stored.time_zone)
    assert (same.tier, same.model) == (stored.tier.value if stored.tier else None, stored.model)
    assert same.above_tokens == stored.above_tokens
    named = {"project": same.project, "key": same.key, "each": same.each_end_user}
    assert named == {
        "project": "prj_1" if stored.kind is SubjectKind.PROJECT else None,
        "key": "key_1" if stored.kind is SubjectKind.KEY else None,
        "each": stored.is_default,
    }


def test_a_ceiling_is_typed_beside_the_rate_and_empty_is_none() -> None:
    rate = DAY | {"window": "rate", "rate_per_s": "5", "amount": "50", "tier": "batch"}
    assert set_of(rate | {"ceiling_per_s": " 62.5 "}, "ten_a").ceiling_per_s == 62.5
    assert set_of(rate | {"ceiling_per_s": " "}, "ten_a").ceiling_per_s is None
    with pytest.raises(Invalid) as refused:
        set_of(rate | {"ceiling_per_s": "fast"}, "ten_a")
    assert refused.value.field == "ceiling_per_s"


def test_an_override_ends_after_hours() -> None:
    form = {"override_amount": "7.5", "for_h": "1.5", "reason": "launch"}
    wanted = override_of(limit(Meter.COST_NANOUSD, 5, window=Window.DAY), form)
    assert (wanted.amount, wanted.for_s, wanted.reason) == (7_500_000_000, 5_400.0, "launch")
    with pytest.raises(Invalid) as refused:
        override_of(limit(), form | {"override_amount": "5", "for_h": "long"})
    assert refused.value.field == "for_h"
