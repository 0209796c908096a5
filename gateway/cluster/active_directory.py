"""Applies the directory's current revision in this gateway and confirms it to the others.

An admin act is in force when every gateway has confirmed its revision in its database row: it was applied to
its copy of the directory and to waiting and running requests (`GatewayRegistry.not_serving`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.deps import GatewayDeps
from gateway.pools.pool import Pools
from tenants.errors import DatabaseUnavailable
from tenants.quota.store import QuotaStoreUnavailable

log = logging.getLogger("fairgate.gateway.directory")


class ActiveDirectory:
    def __init__(self, deps: GatewayDeps, pools: Pools, also: Callable[[], Awaitable[None]]) -> None:
        """`also`: applies other changes of a revision; may raise `DatabaseUnavailable`."""
        self._deps = deps
        self._pools = pools
        self._also = also
        self._confirmed = -1
        self._following = asyncio.Lock()

    async def run(self) -> None:
        while True:
            await self._deps.directory.next_poll()
            try:
                await self.follow()
            except Exception:
                log.exception("the directory was not followed; it is tried again")

    async def follow(self) -> None:
        """Applies and confirms the current revision; neither if a store is unavailable."""
        directory = self._deps.directory
        async with self._following:
            revision = directory.revision
            if revision == self._confirmed:
                return
            try:
                await self._also()
                await self._pools.follow_directory()
                await self._deps.registry.serve(self._deps.gateway_id, revision)
                self._confirmed = revision
            except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
                log.warning("revision %d is not confirmed yet: %s", revision, type(error).__name__)

    async def refresh(self) -> None:
        """Reads and applies what is stored now. Raises `DatabaseUnavailable`."""
        await self._deps.directory.refresh()
        await self.follow()

    async def changed(self) -> list[str]:
        """Applies an admin act and waits up to `CONFIRM_S` for the other gateways. Returns the ids of those
        that have not confirmed it. Raises `DatabaseUnavailable`."""
        await self.refresh()
        late = await self._deps.registry.not_serving(self._deps.config.gateway_stale_s)
        return [row.gateway_id for row in late]
