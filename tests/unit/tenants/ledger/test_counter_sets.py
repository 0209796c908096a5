"""A set of counters has one name, which no other set shares."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tenants.ledger.counter_sets import MAX_KNOWN, KnownSets, set_id
from tenants.storage.tables import ledger

COUNTERS = st.lists(st.text('ab,"[]\\', max_size=3), max_size=4).map(tuple)


@settings(deadline=None)
@given(COUNTERS, COUNTERS)
def test_equal_sets_have_equal_names_and_no_others(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (set_id(one) == set_id(other)) is (set(one) == set(other))


def test_a_name_fits_its_column_and_stays_what_it_is() -> None:
    # Rows on disk have it: another digest would need a migration.
    assert set_id(("tenant:a@1", "key:b")) == "kF8mbptmQzFMHH8T"
    assert len("kF8mbptmQzFMHH8T") <= (ledger.c.counter_set.type.length or 0)
    assert set_id(()) is None


def test_what_is_known_is_bounded() -> None:
    known = KnownSets()
    known.add(("gw", "first"))
    assert ("gw", "first") in known
    assert ("other", "first") not in known
    for index in range(MAX_KNOWN):
        known.add(("gw", str(index)))
    assert ("gw", "first") not in known
    assert ("gw", str(MAX_KNOWN - 1)) in known
