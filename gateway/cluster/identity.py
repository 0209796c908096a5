"""Detects another process under this gateway's id, as with a copied data directory.

Two processes with one id would settle each other's running requests as lost. So another process's row is
watched for two heartbeats: if it advances, the process is alive; otherwise this process takes over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from tenants.directory.gateways import GatewayRegistry, GatewaySeen, IdentityTaken, Instance

WATCHED_BEATS = 2
LOOKS_PER_BEAT = 4

log = logging.getLogger("fairgate.gateway.identity")


class RivalWatch:
    """Watches the heartbeat of another process with the same id. Pure."""

    def __init__(self, beat_s: float) -> None:
        self._watch_s = WATCHED_BEATS * beat_s
        self._first: GatewaySeen | None = None
        self._still_since_s = 0.0

    def look(self, rival: GatewaySeen, now_s: float) -> Literal["watch", "lives", "still"]:
        """Judges the row as read at `now_s`."""
        if self._first is None:
            self._first, self._still_since_s = rival, now_s - rival.silent_s
        if rival.heartbeat_us != self._first.heartbeat_us:
            return "lives"
        return "still" if now_s - self._still_since_s > self._watch_s else "watch"


async def claim(
    registry: GatewayRegistry,
    gateway_id: str,
    instance: Instance,
    beat_s: float,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Returns once no other process serves under `gateway_id`; call it before connecting to engines. Raises
    `IdentityTaken`, `DatabaseUnavailable`."""
    watch = RivalWatch(beat_s)
    is_told = False
    while (seen := await registry.find(gateway_id)) is not None and not instance.follows(seen):
        match watch.look(seen, clock()):
            case "lives":
                raise IdentityTaken(seen)
            case "still":
                return
        if not is_told:
            is_told = True
            log.warning(
                "gateway %s had a heartbeat %.1f s ago: its process is watched for %g s",
                gateway_id,
                seen.silent_s,
                WATCHED_BEATS * beat_s,
            )
        await sleep(beat_s / LOOKS_PER_BEAT)
