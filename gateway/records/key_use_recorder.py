"""Records when each key was last used, off the request path: once a minute and at the end."""

from __future__ import annotations

from functools import partial

from gateway.background import BackgroundWriter, Site
from tenants.directory import key_uses

MAX_WRITTEN = 1_000


class KeyUseRecorder(BackgroundWriter):
    """Use from one event loop."""

    task_name = "gateway uses of keys"
    failed = "uses of keys could not be written; it is tried again"
    unavailable = "uses of keys wait"
    flush_every_s = 60.0

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._last_us: dict[str, int] = {}

    def note(self, key_id: str) -> None:
        self._last_us[key_id] = self._now_us()

    async def flush(self) -> None:
        """Keeps what is not confirmed. Raises `DatabaseUnavailable`."""
        noted = list(self._last_us.items())
        for start in range(0, len(noted), MAX_WRITTEN):
            chunk = dict(noted[start : start + MAX_WRITTEN])
            await self._database.write(partial(key_uses.note, last_us=chunk))
            for key_id, last_us in chunk.items():
                if self._last_us[key_id] == last_us:  # not used again meanwhile
                    del self._last_us[key_id]
