"""Applies the stored brakes of tiers to this gateway's queues, control loops and engines.

Stored brakes apply to all gateways of a database; the directory's revision shows changes. Each gateway
releases an expired brake by its own clock, and the first that can write it audits the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from engine.messages import TIER_RANKS
from engine.scheduling.brakes import Brakes
from gateway.deps import GatewayDeps
from gateway.flow.knobs import Knob
from gateway.pools.pool import ModelPool
from gateway.upstream.base import Upstream
from tenants.admin.platform.brakes import Brake
from tenants.errors import DatabaseUnavailable
from tenants.types import Tier

log = logging.getLogger("fairgate.gateway.brakes")


class ActiveBrakes:
    def __init__(self, deps: GatewayDeps, pools: Mapping[str, ModelPool]) -> None:
        """`pools` may be filled later, before `start`."""
        self.now: tuple[Brake, ...] = ()
        """The active ones."""
        self._stored: list[Brake] = []
        self._deps = deps
        self._pools = pools
        self._seen_revision = -1
        self._following = asyncio.Lock()

    async def start(self) -> None:
        """Applies what is stored, even nothing: engines may have old brakes. Raises `DatabaseUnavailable`."""
        await self._read()
        self._apply(self._in_force())

    async def follow(self) -> None:
        async with self._following:
            with suppress(DatabaseUnavailable):
                if self._deps.directory.revision != self._seen_revision:
                    await self._read()
            holds = self._in_force()
            if holds != self.now:
                self._apply(holds)
            if len(holds) < len(self._stored):
                with suppress(DatabaseUnavailable):
                    await self._deps.admin.brakes.end_over()
                    await self._read()

    async def _read(self) -> None:
        revision = self._deps.directory.revision
        self._stored = await self._deps.admin.brakes.stored()
        self._seen_revision = revision

    def _in_force(self) -> tuple[Brake, ...]:
        now_us = round(self._deps.wall_clock() * 1e6)
        return tuple(brake for brake in self._stored if not brake.is_over(now_us))

    def tell(self, upstream: Upstream) -> None:
        upstream.set_brakes(self._shares())

    def _shares(self) -> dict[int, float]:
        # A share of 1 bounds nothing: requests may be sent ahead of the engine as without it.
        return {TIER_RANKS[hold.tier.value]: hold.share for hold in self.now if hold.share < 1}

    def _apply(self, holds: tuple[Brake, ...]) -> None:
        for brake in (*self.now, *holds):
            if (brake in self.now) != (brake in holds):
                what = "holds" if brake in holds else "has ended"
                log.warning("the brake on %s (share %g) %s", brake.tier.value, brake.share, what)
        self.now = holds
        shares = self._shares()
        most = shares.get(TIER_RANKS[Tier.BATCH.value], 1.0)
        for upstream in self._deps.upstreams:
            self.tell(upstream)
        for pool in self._pools.values():
            pool.control.bound(Knob.BATCH_SHARE, most)
            pool.flow.set_brakes(Brakes(shares), self._deps.clock())
            pool.dispatcher.pump()
