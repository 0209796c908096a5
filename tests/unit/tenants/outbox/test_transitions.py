"""When incidents begin and end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tenants.outbox import kinds
from tenants.outbox.kinds import ALERT_KINDS, BY_SUBJECT, OF_TENANTS
from tenants.outbox.transitions import Condition, Incident, Transitions, ripe, transitions

S = 1_000_000
BURN = Condition(kinds.SLO_BURN, "ten_1:standard:ttft:3600", "it burns", "ten_1")
KEY = Condition(kinds.KEY_EXPIRES, "key_1", "it expires", "ten_1")
DOWN = Condition(kinds.REPLICA_DOWN, "pool:one", "it is down")
EVERY = set(BY_SUBJECT)


def incident(of: Condition, fired_us: int, quiet_us: int | None = None) -> Incident:
    subject, severity = of.kind.subject, of.kind.severity
    return Incident(
        "inc_1", of.key, subject, of.tenant_id, severity, of.summary, {}, of.page, fired_us, quiet_us
    )


def test_a_condition_fires_once_and_is_resolved_once() -> None:
    assert transitions([], [KEY], EVERY, 0) == Transitions(fired=[KEY])
    fires = incident(KEY, 0)
    assert not transitions([fires], [KEY], EVERY, 1)
    assert transitions([fires], [], EVERY, 2) == Transitions(resolved=[fires])


def test_one_that_comes_back_soon_is_the_same_incident() -> None:
    fires = incident(BURN, 0)
    assert transitions([fires], [], EVERY, 10 * S) == Transitions(quiet=[fires])
    quiet = replace(fires, quiet_us=10 * S)
    assert transitions([quiet], [BURN], EVERY, 20 * S) == Transitions(back=[quiet])
    assert not transitions([quiet], [], EVERY, (10 + BURN.kind.quiet_s) * S - 1)
    assert transitions([quiet], [], EVERY, (10 + BURN.kind.quiet_s) * S) == Transitions(resolved=[quiet])


def test_what_could_not_be_looked_at_goes_on_firing() -> None:
    fires = incident(DOWN, 0)
    assert not transitions([fires], [], EVERY - {"replica.down"}, 10**12)
    gone = replace(fires, subject="of.a.newer.version", key="of.a.newer.version:x")
    assert transitions([gone], [], EVERY, 1).resolved == [gone]


def test_a_condition_that_must_hold_for_a_while_fires_after_that() -> None:
    due, since = ripe([DOWN, KEY], {}, 0)
    assert due == [KEY]
    due, since = ripe([DOWN], since, (DOWN.kind.after_s - 1) * S)
    assert due == []
    assert ripe([DOWN], since, DOWN.kind.after_s * S)[0] == [DOWN]
    _, since = ripe([], since, 50 * S)
    assert ripe([DOWN], since, DOWN.kind.after_s * S)[0] == []


def test_the_kinds_are_told_apart_and_those_of_tenants_are_kinds() -> None:
    assert len({kind.subject for kind in ALERT_KINDS}) == len(ALERT_KINDS)
    assert set(OF_TENANTS) < set(BY_SUBJECT)
    assert all(len(kind.subject) <= 32 and kind.says.endswith(".") for kind in ALERT_KINDS)


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from([BURN, KEY, DOWN]).map(lambda each: each.key)),
            st.sets(st.sampled_from(sorted({BURN.kind.subject, KEY.kind.subject, DOWN.kind.subject}))),
            st.integers(0, 600),
        ),
        max_size=30,
    )
)
def test_firing_and_resolved_alternate_whatever_is_seen(rounds: list[tuple[set[str], set[str], int]]) -> None:
    """Each round: what is so, what could be looked at, and the seconds since the last one."""
    by_key = {each.key: each for each in (BURN, KEY, DOWN)}
    open_: dict[str, Incident] = {}
    told: dict[str, list[str]] = {key: [] for key in by_key}
    now_us = 0
    for here, looked_at, seconds in rounds:
        now_us += seconds * S
        changes = transitions(list(open_.values()), [by_key[key] for key in sorted(here)], looked_at, now_us)
        for condition in changes.fired:
            told[condition.key].append("firing")
            open_[condition.key] = incident(condition, now_us)
        for each in changes.resolved:
            told[each.key].append("resolved")
            assert each.subject in looked_at
            del open_[each.key]
        for each in changes.quiet:
            open_[each.key] = replace(each, quiet_us=now_us)
        for each in changes.back:
            open_[each.key] = replace(each, quiet_us=None)
        assert here <= open_.keys()
    for each in told.values():
        assert each == ["firing", "resolved"] * (len(each) // 2) + ["firing"] * (len(each) % 2)
