"""How many connections there are, and which one gives way."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http.connection_table import UNCOUNTED, ConnectionLimits, ConnectionTable


def table(max_connections: int = 3, max_per_address: int = 2) -> ConnectionTable[str]:
    return ConnectionTable(ConnectionLimits(max_connections, max_per_address, 65_536, 128, 10.0, 30.0))


def test_the_one_that_has_rested_longest_without_a_key_gives_way_then_one_with_a_key() -> None:
    places = table(max_per_address=9)
    for name in ("known", "old", "new"):
        assert places.enter(name, name, 30.0) is None
    places.work("known")
    places.rest("known", 1.0, is_known=True)
    places.rest("old", 99.0, is_known=False)  # its head has begun: it keeps its place in the order
    assert places.enter("a", "a", 30.0) == "old"
    assert places.enter("b", "b", 30.0) == "new"
    for name in ("a", "b"):
        places.work(name)
    assert places.enter("c", "c", 30.0) == "known"
    places.work("c")
    with pytest.raises(ApiError) as refused:
        places.enter("d", "d", 30.0)
    assert (refused.value.status, refused.value.code) == (503, "too_many_connections")
    assert len(places) == 3


def test_an_address_has_its_share_and_a_proxy_has_none() -> None:
    places = table(max_connections=9)
    for name in ("a", "b"):
        places.enter(name, "x", 30.0)
    with pytest.raises(ApiError) as refused:
        places.enter("c", "x", 30.0)
    assert (refused.value.status, refused.value.code) == (429, "address_has_too_many")
    places.leave("a")
    places.leave("a")
    places.enter("c", "x", 30.0)
    for name in ("d", "e", "f"):
        places.enter(name, UNCOUNTED, 30.0)
    assert len(places) == 5


def test_those_that_rest_for_too_long_are_named() -> None:
    places = table()
    places.enter("a", "x", 30.0)
    places.enter("b", "x", 31.0)
    places.enter("c", "y", 30.0)
    places.work("c")
    assert places.overdue(29.9) == []
    assert places.overdue(30.0) == ["a"]
    places.rest("c", 30.5, is_known=True)
    assert places.overdue(40.0) == ["a", "b", "c"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "work", "rest", "known"]), st.integers(0, 9), st.integers(0, 3)
        ),
        max_size=60,
    )
)
def test_counts_are_those_of_what_is_open(moves: list[tuple[str, int, int]]) -> None:
    places = table(max_connections=4, max_per_address=2)
    opened: dict[str, int] = {}
    working: set[str] = set()
    for move, number, address in moves:
        name = f"c{number}"
        match move:
            case "enter" if name not in opened:
                full, share = len(opened) == 4, Counter(opened.values())[address]
                if share == 2 or (full and working == set(opened)):
                    with pytest.raises(ApiError) as refused:
                        places.enter(name, address, 30.0)
                    assert refused.value.status == (429 if share == 2 else 503)
                    continue
                displaced = places.enter(name, address, 30.0)
                assert (displaced is not None) == full
                if displaced is not None:
                    assert displaced not in working
                    del opened[displaced]
                opened[name] = address
            case "leave":
                places.leave(name)
                opened.pop(name, None)
                working.discard(name)
            case "work" if name in opened:
                places.work(name)
                working.add(name)
            case "rest" | "known" if name in working:
                places.rest(name, 30.0, is_known=move == "known")
                working.discard(name)
        assert len(places) == len(opened)
        assert set(places.overdue(99.0)) == set(opened) - working
