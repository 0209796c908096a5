"""Counts of refusals keep their sum in bounded memory; a tenant reads no numbers of others' limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenants.counts.refusal_store import RefusalKey, RefusedRequest, added, merged

KEYS = st.builds(
    RefusalKey,
    st.integers(0, 5).map(lambda minute: minute * 60),
    st.sampled_from(["", "ten_a", "ten_b", "ten_c"]),
    st.sampled_from(["rate_limit_exceeded", "queue_full"]),
    st.sampled_from(["", "lim_1", "lim_2"]),
)
COUNTS = st.dictionaries(KEYS, st.integers(1, 1_000))


def by_code(counts: dict[RefusalKey, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, count in counts.items():
        found[key.code] = found.get(key.code, 0) + count
    return found


@given(COUNTS, st.integers(2, 40))
def test_merged_counts_lose_nothing_and_are_few(counts: dict[RefusalKey, int], most: int) -> None:
    few = merged(dict(counts), most)
    assert by_code(few) == by_code(counts)
    assert len(few) <= most
    if len(counts) <= most:
        assert few == counts


def test_minutes_go_before_limits_and_these_before_tenants() -> None:
    counts = {
        RefusalKey(minute * 60, f"ten_{tenant}", "queue_full", f"lim_{limit}"): 1
        for minute in range(2)
        for tenant in range(2)
        for limit in range(2)
    }
    minutes = merged(dict(counts), 4)
    assert {key.minute_s for key in minutes} == {0}
    assert set(minutes.values()) == {2}
    limits = merged(dict(counts), 3)
    assert set(limits) == {RefusalKey(0, f"ten_{tenant}", "queue_full", "") for tenant in range(2)}
    assert merged(dict(counts), 1) == {RefusalKey(0, "", "queue_full", ""): 8}


def test_counts_are_added_where_they_are() -> None:
    counts = {RefusalKey(0, "t", "a", ""): 1}
    added(counts, {RefusalKey(0, "t", "a", ""): 2, RefusalKey(60, "t", "a", ""): 5})
    assert counts == {RefusalKey(0, "t", "a", ""): 3, RefusalKey(60, "t", "a", ""): 5}


def test_a_refusal_is_counted_in_the_minute_it_happened() -> None:
    assert RefusedRequest("req_1", 119_999_999, "queue_full", tenant_id="t").key == RefusalKey(
        60, "t", "queue_full", ""
    )


def test_a_tenant_reads_its_own_limits_and_no_numbers_of_the_platforms() -> None:
    own = RefusedRequest("req_1", 1, "insufficient_quota", limit_id="lim_1", wanted=5, available=2)
    assert own.for_tenant() == own
    of_all = RefusedRequest(
        "req_1", 1, "insufficient_quota", limit_id="lim_1", wanted=5, available=2, of_platform=True
    )
    shown = of_all.for_tenant().as_json()
    assert (shown["limit_id"], shown["wanted"], shown["available"]) == (None, None, None)
    assert shown["of_platform"] is True
    assert of_all.as_json()["limit_id"] == "lim_1"
