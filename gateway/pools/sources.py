"""Sources of a pool's engines: the settings, and rows that a placer writes in the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.membership import NamedEngine
from tenants.directory.placed_engines import PlacedEngines
from tenants.errors import DatabaseUnavailable


class SourceFailed(Exception):
    """It says nothing now; the message says why."""


class MemberSource(Protocol):
    @property
    def name(self) -> str: ...

    async def said(self) -> Sequence[NamedEngine]:
        """All engines that it names now. Raises `SourceFailed`."""
        ...


class FixedSource:
    """What the settings name; it never changes."""

    def __init__(self, name: str, engines: Sequence[NamedEngine]) -> None:
        self.name = name
        self._engines = engines

    async def said(self) -> Sequence[NamedEngine]:
        return self._engines


class PlacedSource:
    """Rows of the database, each with a lease."""

    name = "sql"

    def __init__(self, placed: PlacedEngines) -> None:
        self._placed = placed

    async def said(self) -> Sequence[NamedEngine]:
        try:
            rows = await self._placed.read()
        except DatabaseUnavailable as error:
            raise SourceFailed(f"the database does not answer: {type(error).__name__}") from None
        return [NamedEngine(row.name, row.address, self.name, row.left_s > 0) for row in rows]
