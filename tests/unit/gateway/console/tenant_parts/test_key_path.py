"""Which limits stand above a key, and which of them binds it first."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime

from gateway.console.pages.tenant_parts.key_path import UNLIMITED, path_of, shown_path, words_of
from tenants.nouns.key import ApiKey
from tenants.quota.store import LimitState
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Window
from tests.support.quota import limit, on_platform

KEY = ApiKey(
    key_id="key_1",
    tenant_id="ten_a",
    project_id="prj_1",
    name="k",
    prefix="fg_live_x",
    scopes=frozenset({"inference"}),
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)
OF_KEY = limit(Meter.REQUESTS, 50, window=Window.DAY, kind=SubjectKind.KEY, subject_id="key_1")
OF_PROJECT = limit(Meter.REQUESTS, 60, window=Window.DAY, kind=SubjectKind.PROJECT, subject_id="prj_1")
OF_TENANT = limit(Meter.TOTAL_TOKENS, 1_000, window=Window.DAY)
OF_ALL = on_platform(Meter.REQUESTS, 9_000, window=Window.DAY)


def states(*used: tuple[Limit, int]) -> dict[str, LimitState]:
    return {each.identity: LimitState(each, part, 0, each.amount - part, math.inf) for each, part in used}


def test_a_path_goes_from_the_key_up_and_has_no_one_elses_limits() -> None:
    others = [
        limit(kind=SubjectKind.KEY, subject_id="key_2"),
        limit(kind=SubjectKind.PROJECT, subject_id="prj_2"),
        limit(tenant_id="ten_b"),
        limit(kind=SubjectKind.END_USER),
    ]
    mixed = [OF_ALL, OF_TENANT, *others, OF_PROJECT, OF_KEY]
    assert path_of(KEY, mixed) == [OF_KEY, OF_PROJECT, OF_TENANT, OF_ALL]


def test_the_smallest_share_left_binds_first_wherever_it_stands() -> None:
    path = path_of(KEY, [OF_KEY, OF_PROJECT, OF_TENANT])
    used = states((OF_KEY, 10), (OF_PROJECT, 10), (OF_TENANT, 900))
    shown = shown_path(path, used, shows_platform=True)
    assert [each.level for each in shown if each.binds_first] == ["tenant"]
    assert words_of(shown) == "tenant: 1,000 tokens a day (UTC)"


def test_a_soft_limit_binds_nothing_and_an_empty_path_is_said_to_be_unlimited() -> None:
    soft = replace(OF_TENANT, mode=LimitMode.SOFT)
    shown = shown_path([soft], states((soft, 999)), shows_platform=True)
    assert [each.binds_first for each in shown] == [False]
    assert words_of(shown) == UNLIMITED
    assert words_of([]) == UNLIMITED


def test_while_counters_are_away_a_capped_key_is_still_not_called_unlimited() -> None:
    shown = shown_path([OF_TENANT], {}, shows_platform=True)
    assert words_of(shown) == "1 limits on its path"
    assert shown[0].used is None


def test_a_tenants_people_see_of_the_platform_only_whether_there_is_room() -> None:
    shown = shown_path([OF_ALL], states((OF_ALL, 9_000)), shows_platform=False)
    assert words_of(shown) == "all tenants together: no room left"
    assert "9,000" not in repr(shown)
    [there] = shown_path([OF_ALL], states((OF_ALL, 1)), shows_platform=False)
    assert there.used_words == "has room"
