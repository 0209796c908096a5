"""What the page of usage makes of an answer: sums by group, a table over time, the period before. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from gateway.console.pages.money.amounts import Measure, SummedUsage, amounts_of
from gateway.console.return_path import with_query
from tenants.instants import from_us, to_us
from tenants.usage.query import LABEL
from tenants.usage.read import COLUMNS

MOST_LINES = 6
"""Groups with a column of their own in the table over time; the others share one."""
NAMED = {"tenant": "tenant", "project": "project", "key": "key_name"}
"""Groups of ids, with the field that has the name."""
REQUESTS = "/console/requests"

Ids = tuple[str, ...]
"""The value of each group; empty: none."""
Row = Mapping[str, Any]
"""Of an answer of the usage route."""


@dataclass(frozen=True)
class GroupSum:
    """One group's sums."""

    ids: Ids
    names: tuple[str, ...]
    now: SummedUsage
    before: SummedUsage | None
    """None: not known."""
    link: str
    """To its requests; empty: the list of requests has no such filter."""


@dataclass(frozen=True)
class TimeRow:
    """One window."""

    start_us: int
    end_us: int
    values: list[int]


@dataclass(frozen=True)
class TimeTable:
    """An amount over time: a column for each of the largest groups, and one for all others."""

    columns: list[str]
    rows: list[TimeRow]


def ids_of(row: Row, groups: Sequence[str]) -> Ids:
    return tuple(row[COLUMNS.get(group, group)] or "" for group in groups)


def names_of(row: Row, groups: Sequence[str]) -> tuple[str, ...]:
    names = []
    for group in groups:
        value = row[COLUMNS.get(group, group)]
        name = str(row.get(NAMED.get(group, ""), None) or value or "none")
        is_alone = group == "project" and "tenant" not in groups and row.get("tenant")
        names.append(f"{row['tenant']} / {name}" if is_alone else name)
    return tuple(names)


def summed(rows: Sequence[Row], groups: Sequence[str]) -> dict[Ids, SummedUsage]:
    """By group, all windows together."""
    sums: dict[Ids, SummedUsage] = {}
    for row in rows:
        ids = ids_of(row, groups)
        sums[ids] = sums.get(ids, SummedUsage()).plus(amounts_of(row))
    return sums


def group_sums(
    rows: Sequence[Row],
    groups: Sequence[str],
    before: Mapping[Ids, SummedUsage] | None,
    measure: Measure,
    filters: Mapping[str, str],
    *,
    is_whole: bool = True,
) -> list[GroupSum]:
    """Groups of both periods, largest first if `is_whole`, else in row order. `filters`: for links."""
    names = {ids_of(row, groups): names_of(row, groups) for row in rows}
    now = summed(rows, groups)
    sums = [
        GroupSum(
            ids,
            names[ids],
            amounts,
            None if before is None else before.get(ids, SummedUsage()),
            link_of(ids, groups, filters),
        )
        for ids, amounts in now.items()
    ]
    return sorted(sums, key=lambda group: (-measure.of(group.now), group.names)) if is_whole else sums


def link_of(ids: Ids, groups: Sequence[str], filters: Mapping[str, str]) -> str:
    """The group's requests; empty: grouped by labels or an empty value, which that list cannot filter by."""
    values = dict(zip(groups, ids, strict=True))
    if filters.get("label") or any(name.startswith(LABEL) or not value for name, value in values.items()):
        return ""
    return with_query(REQUESTS, {**filters, **values})


def over_time(
    rows: Sequence[Row], groups: Sequence[str], measure: Measure, windows: Iterable[tuple[int, int]]
) -> TimeTable:
    """One row for each of the windows, also where nothing was; the columns add up to all of it."""
    names = {ids_of(row, groups): " · ".join(names_of(row, groups)) for row in rows}
    totals = {ids: measure.of(amounts) for ids, amounts in summed(rows, groups).items()}
    ordered = sorted(totals, key=lambda ids: (-totals[ids], names[ids]))
    largest: list[Ids] = ordered[:MOST_LINES] if groups else [()]
    has_others = len(totals) > len(largest)
    buckets = {
        start_us: TimeRow(start_us, end_us, [0] * (len(largest) + has_others)) for start_us, end_us in windows
    }
    for row in rows:
        ids = ids_of(row, groups)
        place = largest.index(ids) if ids in largest else -1
        buckets[to_us(datetime.fromisoformat(row["start"]))].values[place] += measure.of(amounts_of(row))
    columns = [names.get(ids, "all") or "all" for ids in largest] + ["all others"] * has_others
    return TimeTable(columns, list(buckets.values()))


def window_words(at_us: int, *, window: str, time_zone: str) -> str:
    """An edge of windows by the clock of their zone."""
    at = from_us(at_us).astimezone(ZoneInfo(time_zone))
    if at.time() != time():
        return at.strftime("%Y-%m-%d %H:%M")
    return at.strftime("%Y-%m" if window == "month" and at.day == 1 else "%Y-%m-%d")


def period_before(from_us_: int, to_us_: int, time_zone: str) -> tuple[str, str]:
    """The equally long period before, as instants, by the zone's clock: its days, too, begin at midnight."""
    zone = ZoneInfo(time_zone)
    begin, end = (from_us(instant_us).astimezone(zone) for instant_us in (from_us_, to_us_))
    length = end.replace(tzinfo=None) - begin.replace(tzinfo=None)
    if length <= timedelta(0):  # an hour that the clock has twice
        length = end - begin
    return (begin - length).isoformat(), begin.isoformat()
