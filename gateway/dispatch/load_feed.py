"""Shares load reports of a shared pool between gateways through a Redis stream.

Every half second one round trip adds this gateway's report and reads the others'. The stream keeps the last
`MAX_KEPT` batches for gateways that start or were cut off. Redis stamps each batch and returns its time, so
clocks are never compared. While it is away the others' load is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

TELL_EVERY_S = 0.5
MAX_KEPT = 256
EXPIRES_S = 600
"""Of the stream, once no gateway reports."""

log = logging.getLogger("fairgate.gateway.load_feed")


class LoadFeed:
    """Use from one event loop."""

    def __init__(self, redis: Any, key: str, clock: Callable[[], float]) -> None:
        self._redis = redis
        self._key = key
        self._clock = clock
        self._last_id: str | bytes = "0-0"
        self.tell: Callable[[float], bytes | None] = lambda now_s: None
        """The next batch, or None; the same one again until `told` was called."""
        self.told: Callable[[], None] = lambda: None
        self.hear: Callable[[bytes, float], None] = lambda packed, told_s: None
        """Called with each batch and its time."""
        self.heard: Callable[[float], None] = lambda now_s: None
        """Called after every exchange."""

    async def exchange(self) -> None:
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                if (packed := self.tell(self._clock())) is not None:
                    pipe.xadd(self._key, {"b": packed}, maxlen=MAX_KEPT, approximate=True)
                    pipe.expire(self._key, EXPIRES_S)
                pipe.time()
                pipe.xread({self._key: self._last_id}, count=MAX_KEPT)
                *_, (seconds, microseconds), found = await pipe.execute()
        except (RedisError, OSError, TimeoutError):
            return  # the queue's own exchange notices, and says so
        self.told()
        now_s = self._clock()
        server_s = seconds + microseconds / 1e6
        for _, entries in found or ():
            for entry_id, fields in entries:
                self._last_id = entry_id
                told_s = now_s - max(0.0, server_s - int(entry_id.split(b"-")[0]) / 1e3)
                try:
                    self.hear(fields[b"b"], told_s)
                except (KeyError, msgspec.DecodeError):
                    log.error("what another gateway told of its load is not understood")
        self.heard(now_s)
