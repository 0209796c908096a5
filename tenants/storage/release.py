"""The order of releases, and the oldest one that may serve a database."""

from __future__ import annotations

import re

from sqlalchemy import Connection, select

from tenants.errors import Invalid
from tenants.storage.tables import settings

OLDEST_RELEASE = "schema.oldest_release"
"""The row of `settings` with the oldest release that may serve; without one, each may."""
MAX_RELEASE_CHARS = 32
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


def is_older(release: str, than: str) -> bool:
    """By the numbers alone: what follows them (`rc1`, `+local`) does not count. Without numbers it is the
    oldest."""
    return _numbers(release) < _numbers(than)


def newest(*releases: str) -> str:
    return max(releases, key=_numbers)


class ReleaseTooOld(Invalid):
    """The database needs a newer release than the one that runs. The message names both."""


def require_may_serve(connection: Connection, release: str) -> None:
    """Raises `ReleaseTooOld` where the database needs a newer release than `release`."""
    row = select(settings.c.value).where(settings.c.name == OLDEST_RELEASE)
    require_new(release, connection.execute(row).scalar())


def require_new(release: str, oldest: str | None) -> None:
    """Raises `ReleaseTooOld` where `release` is older than the oldest that may serve the database."""
    if oldest is not None and is_older(release, oldest):
        raise ReleaseTooOld(
            "database_url",
            f"its schema needs Fairgate {oldest} or newer, and this is {release}: install {oldest} or newer,"
            " or restore a backup from before",
        )


def apart(one: str, other: str) -> int:
    """How many releases one is later than the other, by their first two numbers: after a new first one the
    second counts from 0."""
    (a, b), (c, d) = sorted((*_numbers(each), 0, 0)[:2] for each in (one, other))
    return d - b if a == c else c - a + d


def _numbers(release: str) -> tuple[int, ...]:
    found = _NUMBERS.match(release)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
