"""Records are stored and shown by the types of their fields."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

from tenants.networks import Network, network_of
from tenants.nouns.columns import As, Record
from tenants.types import Labels, Tier

AT = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing(Record):
    thing_id: Annotated[str, As("id")]
    shown_only: Annotated[str, As(is_stored=False)] = ""
    tier: Tier | None = None
    tiers: frozenset[Tier] = frozenset()
    words: frozenset[str] | None = None
    networks: tuple[Network, ...] = ()
    labels: Labels | None = None
    made_at: datetime = AT
    ends_at: datetime | None = None
    is_now: Annotated[bool, As(json="now", is_only_if_true=True)] = False


FULL = Thing(
    thing_id="a",
    tier=Tier.BATCH,
    tiers=frozenset({Tier.BATCH, Tier.INTERACTIVE}),
    words=frozenset({"b", "a"}),
    networks=(network_of("10.0.0.0/8"),),
    labels={"team": ("x", "y")},
    ends_at=AT,
    is_now=True,
)


def test_a_row_holds_plain_values_and_gives_the_record_back() -> None:
    row = FULL.as_row()
    assert json.loads(json.dumps(row)) == row
    assert Thing.from_row(row, shown_only="") == FULL
    assert {"id", "made_us", "ends_us", "is_now"} < row.keys()
    assert row["tiers"] == ["interactive", "batch"]
    assert "shown_only" not in row


def test_nothing_is_stored_as_null() -> None:
    bare = Thing(thing_id="a")
    row = bare.as_row()
    assert [row[name] for name in ("tier", "words", "networks", "labels", "ends_us")] == [None] * 5
    assert row["tiers"] == []
    assert Thing.from_row(row) == bare


def test_json_has_names_of_its_own_and_instants_as_text() -> None:
    shown = FULL.as_json()
    assert (shown["id"], shown["made_at"], shown["now"]) == ("a", "2026-01-31T12:00:00.000005+00:00", True)
    assert shown["words"] == ["a", "b"]
    assert "now" not in replace(FULL, is_now=False).as_json()
