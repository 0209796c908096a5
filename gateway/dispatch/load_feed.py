"""Shares load reports of a shared pool between gateways through a Redis stream.

Every half second one round trip adds this gateway's report and reads the others'. The stream keeps the last
`MAX_KEPT` batches for gateways that start or were cut off. Redis stamps each batch and returns its time, so
clocks are never compared. While it is away the others' load is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from redis.exceptions import RedisError

from tenants.storage.redis_client import is_cluster

TELL_EVERY_S = 0.5
MAX_KEPT = 256
EXPIRES_S = 600
"""Of the stream, once no gateway reports."""

TIME = "return redis.call('TIME')"
"""In a cluster a command without a key could go to another node than the stream's."""

log = logging.getLogger("fairgate.gateway.load_feed")


class LoadReports(Protocol):
    """What one gateway tells of a pool's load, and hears (`gateway/explain/pool_load.py`)."""

    def tell(self, now_s: float) -> bytes | None:
        """The next batch, or None; the same one again until `told` was called."""
        ...

    def told(self) -> None: ...

    def hear(self, packed: bytes, told_s: float) -> None:
        """A batch of another gateway, or this one, and its time."""
        ...

    def forget_silent(self, now_s: float) -> None:
        """Called after every exchange."""
        ...


class LoadFeed:
    """Use from one event loop."""

    def __init__(self, redis: Any, key: str, clock: Callable[[], float], reports: LoadReports) -> None:
        self._redis = redis
        self._is_cluster = is_cluster(redis)
        self._key = key
        self._clock = clock
        self._last_id: str | bytes = "0-0"
        self._reports = reports

    async def exchange(self) -> None:
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                if (packed := self._reports.tell(self._clock())) is not None:
                    pipe.xadd(self._key, {"b": packed}, maxlen=MAX_KEPT, approximate=True)
                    pipe.expire(self._key, EXPIRES_S)
                if self._is_cluster:
                    pipe.eval(TIME, 1, self._key)
                else:
                    pipe.time()
                pipe.xread({self._key: self._last_id}, count=MAX_KEPT)
                *_, (seconds, microseconds), found = await pipe.execute()
        except (RedisError, OSError, TimeoutError):
            return  # the queue's own exchange notices, and says so
        self._reports.told()
        now_s = self._clock()
        server_s = int(seconds) + int(microseconds) / 1e6
        for _, entries in found or ():
            for entry_id, fields in entries:
                self._last_id = entry_id
                told_s = now_s - max(0.0, server_s - int(entry_id.split(b"-")[0]) / 1e3)
                try:
                    self._reports.hear(fields[b"b"], told_s)
                except (KeyError, msgspec.DecodeError):
                    log.error("what another gateway told of its load is not understood")
        self._reports.forget_silent(now_s)
