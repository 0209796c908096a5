"""A background writer that adds what it notes to counts in the database, each flush exactly once."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from typing import Generic, TypeVar

from gateway.background import BackgroundWriter, Site
from tenants.errors import DatabaseUnavailable
from tenants.storage.flushes import Flush

Batch = TypeVar("Batch")


class ExactWriter(BackgroundWriter, Generic[Batch]):
    """Repeats a failed batch unchanged under its number before newer ones. Use from one event loop."""

    def __init__(self, site: Site, name: str) -> None:
        """`name`: unique in a process."""
        super().__init__(site)
        self._writer = f"{name}/{secrets.token_hex(8)}"
        self._number = 0
        self._unanswered: Batch | None = None

    @abstractmethod
    def take(self) -> Batch | None:
        """What was noted since the last call; None: nothing."""

    @abstractmethod
    async def write(self, batch: Batch, flush: Flush) -> None:
        """Writes a batch in one transaction with its flush. Raises `DatabaseUnavailable`."""

    async def flush(self) -> None:
        for _ in range(2):  # what is unanswered, and what came since
            if self._unanswered is None:
                self._unanswered = self.take()
                if self._unanswered is None:
                    return
                self._number += 1
            try:
                await self.write(self._unanswered, Flush(self._writer, self._number))
            except DatabaseUnavailable as error:
                self.log.warning("%s: %s", self.unavailable, type(error).__name__)
                return
            self._unanswered = None
