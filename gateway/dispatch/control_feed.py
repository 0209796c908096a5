"""Carries the messages of a shared queue's control loop to Redis, one round trip each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from gateway.flow.control_rules import Move
from gateway.flow.shared.control_session import (
    ControlAnswer,
    ControlLook,
    ControlSession,
    ControlWords,
    control_keys,
    control_script,
)

log = logging.getLogger("fairgate.gateway.control")


class ControlFeed:
    """Of one gateway and pool. Use from one event loop."""

    def __init__(self, redis: Any, prefix: str, pool: str, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.is_alone: Callable[[], bool] = lambda: False
        """Redis is unavailable, and this gateway decides alone."""
        self.round_trips = 0
        self._script = redis.register_script(control_script())
        self._keys = control_keys(prefix, pool)

    async def carry(self, look: ControlLook) -> list[Move]:
        """Exchanges the messages of one observation. Returns its moves."""
        try:
            words = next(look)
            while True:
                words = look.send(await self._say(words))
        except StopIteration as ended:
            return list(ended.value)

    async def leave(self, session: ControlSession) -> None:
        """Lets another gateway decide immediately."""
        with suppress(RedisError, OSError, TimeoutError):
            await self._script(keys=self._keys, args=session.leaves().arguments())

    async def _say(self, words: ControlWords) -> ControlAnswer | None:
        self.round_trips += 1
        try:
            return ControlAnswer.of(await self._script(keys=self._keys, args=words.arguments()))
        except (RedisError, OSError, TimeoutError):
            return None  # the queue's own exchange notices, and says so
        except ValueError:
            log.error("what Redis answered to the control loop is not understood")
            return None
