"""Usual periods of lists, as links that set both ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo

from gateway.console.pages.filters import Filters


class Period(NamedTuple):
    name: str
    """Scripts compute it in the viewer's time zone."""
    words: str
    begin: datetime | date
    end: date | None = None
    """None: now."""

    @property
    def bounds(self) -> Mapping[str, str]:
        """As pages take them: instants, or dates of their time zone."""
        ends = (("from", self.begin), ("to", self.end))
        return {name: "" if at is None else at.isoformat() for name, at in ends}


class PeriodLink(NamedTuple):
    name: str
    words: str
    bounds: Mapping[str, str]
    href: str


def periods(now: datetime) -> list[Period]:
    """By the clock of the instant's time zone."""
    today = now.date()
    month = today.replace(day=1)
    return [
        Period("hour", "Last hour", (now - timedelta(hours=1)).replace(microsecond=0)),
        Period("day", "Today", today),
        Period("week", "7 days", today - timedelta(days=6)),
        Period("month", "This month", month),
        Period("last-month", "Last month", (month - timedelta(days=1)).replace(day=1), month),
    ]


def zone_of(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return UTC


def period_links(filters: Filters, now_s: float, time_zone: str = "UTC") -> list[PeriodLink]:
    """`time_zone`: of dates on that page; unknown ones are read as UTC."""
    now = datetime.fromtimestamp(now_s, zone_of(time_zone))
    return [
        PeriodLink(one.name, one.words, one.bounds, filters.link("", **one.bounds)) for one in periods(now)
    ]
