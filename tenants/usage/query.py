"""Queries of usage, and which sums can answer them. Pure.

Sums are kept by UTC hours and UTC days, so a query is answered from the coarsest sums whose spans no window
cuts: days, days by key and labels, or hours. What none of them answers (a key's usage by the hour, days of a
time zone that is 30 or 45 minutes off) is read from the ledger, of one tenant and a short time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

from tenants.errors import Invalid
from tenants.usage.sums import DAY_US, HOUR_US, Grain

WINDOWS = ("total", "hour", "day", "month")
MOST_DAYS = {"total": 1_100, "hour": 31, "day": 400, "month": 1_100}
"""Of one query, by window."""
MOST_LEDGER_DAYS = 31
GROUPS = ("tenant", "project", "key", "model", "tier", "outcome")
LABEL = "label:"
FINE = frozenset({"project", "key"})
MOST_GROUPS = 8
"""What an export has by itself (five), and three labels."""
MOST_LABELS = 4
FIRST_US, LAST_US = 0, 253_370_764_800 * 1_000_000
"""1970 to 9999: around these, too, every time zone has days and months."""
MAX_NAME = 64
"""Characters of a label's name or value."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Usage from one instant up to another, by window and groups. None: any."""

    from_us: int
    to_us: int
    """Exclusive."""
    window: str = "total"
    group_by: tuple[str, ...] = ()
    """Of `GROUPS`, or `label:<name>`."""
    time_zone: str = "UTC"
    """Whose days and months."""
    tenant_id: str | None = None
    project_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    tier: str | None = None
    outcome: str | None = None
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def is_fine(self) -> bool:
        """It needs sums by key and labels."""
        by_label = any(group.startswith(LABEL) for group in self.group_by)
        named = self.project_id is not None or self.key_id is not None or bool(self.labels)
        return named or by_label or not FINE.isdisjoint(self.group_by)


def check(query: UsageQuery) -> None:
    """Raises `Invalid`."""
    if query.window not in WINDOWS:
        raise Invalid("window", f"{query.window[:40]!r} is not one of {', '.join(WINDOWS)}")
    check_instant("from", query.from_us)
    check_instant("to", query.to_us)
    if query.from_us >= query.to_us:
        raise Invalid("from", "must be before `to`")
    days, most = (query.to_us - query.from_us) / DAY_US, MOST_DAYS[query.window]
    if days > most:
        raise Invalid(
            "from",
            f"{days:.0f} days by window {query.window}; the most is {most}: begin later, or ask in parts",
        )
    check_groups(query.group_by)
    if len(query.labels) > MOST_LABELS:
        raise Invalid("label", f"{len(query.labels)} given; the most is {MOST_LABELS}")
    for name, value in query.labels:
        _check_name(name)
        _check_name(value)


def check_instant(field: str, at_us: int) -> None:
    """Raises `Invalid`."""
    if not FIRST_US <= at_us <= LAST_US:
        raise Invalid(field, f"must lie between {_at(FIRST_US):%Y-%m-%d} and {_at(LAST_US):%Y-%m-%d}")


def check_groups(group_by: tuple[str, ...], known: tuple[str, ...] = GROUPS) -> None:
    """Raises `Invalid` for a group that is none of `known`, and no label."""
    if len(group_by) > MOST_GROUPS or len(set(group_by)) < len(group_by):
        raise Invalid("group_by", f"name each group once, and at most {MOST_GROUPS} of them")
    for group in group_by:
        if group.startswith(LABEL):
            _check_name(group.removeprefix(LABEL), "group_by")
        elif group not in known:
            raise Invalid(
                "group_by", f"{group[:40]!r} is not one of {', '.join(known)}, nor {LABEL}<its name>"
            )


def _check_name(text: str, field: str = "label") -> None:
    # PostgreSQL takes no NUL.
    if not 0 < len(text) <= MAX_NAME or not text.isprintable():
        raise Invalid(field, f"names and values of labels have 1 to {MAX_NAME} printable characters")


def edges(query: UsageQuery) -> list[int]:
    """Starts of windows, and the end of the last: the first and last may be cut by `from` and `to`."""
    between = [] if query.window == "total" else _starts(query)
    return [query.from_us, *(start for start in between if query.from_us < start < query.to_us), query.to_us]


def _starts(query: UsageQuery) -> Iterator[int]:
    zone = ZoneInfo(query.time_zone)
    if query.window == "hour":
        offset = _at(query.from_us).astimezone(zone).utcoffset() or timedelta()
        off_us = round(offset.total_seconds() * 1e6) % HOUR_US
        yield from range((query.from_us + off_us) // HOUR_US * HOUR_US - off_us, query.to_us, HOUR_US)
        return
    day = _at(query.from_us).astimezone(zone).date()
    if query.window == "month":
        day = day.replace(day=1)
    while (start_us := midnight_us(day, zone)) < query.to_us:
        yield start_us
        day = day + timedelta(days=1) if query.window == "day" else next_month(day)


def next_month(day: date) -> date:
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1)


def midnight_us(day: date, zone: ZoneInfo) -> int:
    return round(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * 1_000_000


def _at(at_us: int) -> datetime:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC)


def grain_for(query: UsageQuery, at: list[int], hours_from_us: int) -> Grain | None:
    """The sums that answer the query, whose windows begin and end `at`; None: the ledger does.
    `hours_from_us`: earlier hours were deleted. Raises `Invalid` where nothing can."""
    if all(edge % DAY_US == 0 for edge in at):
        return Grain.KEY_DAY if query.is_fine else Grain.DAY
    if query.is_fine:
        why, ways = "usage by project, key and labels is kept by UTC days", "ask for whole days in UTC"
    elif any(edge % HOUR_US for edge in at):
        why = "usage is kept by UTC hours"
        ways = "begin and end with a full hour, in a time zone that is whole hours off"
    elif query.from_us < hours_from_us:
        why = f"the hours before {_at(hours_from_us).isoformat()} are not kept any more"
        ways = "ask for whole days in UTC, or begin later"
    else:
        return Grain.HOUR
    days = (query.to_us - query.from_us) / DAY_US
    if query.tenant_id is None:
        raise Invalid(_blamed(query, at), f"{why}: {ways}; or name one tenant")
    if days > MOST_LEDGER_DAYS:
        raise Invalid(_blamed(query, at), f"{why}: {ways}; or ask for at most {MOST_LEDGER_DAYS} days")
    return None


def _blamed(query: UsageQuery, at: list[int]) -> str:
    """The field that cuts a span: one end of the range, else the windows'."""
    span_us = DAY_US if query.is_fine else HOUR_US
    for field, edge in (("from", at[0]), ("to", at[-1])):
        if edge % span_us and query.time_zone == "UTC":
            return field
    return "window" if query.time_zone == "UTC" else "time_zone"


def labelled_groups(query: UsageQuery) -> list[str]:
    """Labels that it groups or filters by, each once."""
    grouped = [group.removeprefix(LABEL) for group in query.group_by if group.startswith(LABEL)]
    return list(dict.fromkeys([*grouped, *(name for name, _ in query.labels)]))
