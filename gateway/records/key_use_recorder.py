"""Records when each key was last used, off the request path: once a minute and at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from gateway.background import BackgroundWriter
from tenants.directory import key_uses
from tenants.errors import DatabaseUnavailable
from tenants.storage.database import Database

MAX_WRITTEN = 1_000

log = logging.getLogger("fairgate.gateway.records")


class KeyUseRecorder(BackgroundWriter):
    """Use from one event loop."""

    task_name = "gateway uses of keys"
    log = log
    failed = "uses of keys could not be written; it is tried again"
    unavailable = "uses of keys wait"
    flush_every_s = 60.0

    def __init__(self, database: Database, wall_clock: Callable[[], float]) -> None:
        self._database = database
        self._wall_clock = wall_clock
        self._last_us: dict[str, int] = {}

    def note(self, key_id: str) -> None:
        self._last_us[key_id] = round(self._wall_clock() * 1e6)

    async def flush(self) -> None:
        """Keeps what is not confirmed, as the database is down or the task is cancelled."""
        noted = list(self._last_us.items())
        for start in range(0, len(noted), MAX_WRITTEN):
            chunk = dict(noted[start : start + MAX_WRITTEN])
            try:
                await self._database.write(partial(key_uses.note, last_us=chunk))
            except DatabaseUnavailable as error:
                log.warning("%s: %s", self.unavailable, type(error).__name__)
                return
            for key_id, last_us in chunk.items():
                if self._last_us[key_id] == last_us:  # not used again meanwhile
                    del self._last_us[key_id]
