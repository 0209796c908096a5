"""Brings what the directory says into force in this gateway, and confirms it to the others.

An admin act is in force when every gateway has confirmed its revision: the gateway's copy of the directory
has it, what waits or runs under it was treated by it, and the revision stands in the gateway's row of the
database. The act's route or command waits for that (`GatewayRegistry.not_serving`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.deps import GatewayDeps
from gateway.pools.pool import Lifecycles
from tenants.errors import DatabaseUnavailable
from tenants.quota.store import QuotaStoreUnavailable

log = logging.getLogger("fairgate.gateway.directory")


class ActiveDirectory:
    """Applies the directory to the requests of one gateway. Use from one event loop."""

    def __init__(
        self,
        deps: GatewayDeps,
        lifecycle: Callable[[], Lifecycles],
        also: Callable[[], Awaitable[None]],
    ) -> None:
        """`also`: brings into force what else a revision has changed; may raise `DatabaseUnavailable`."""
        self._deps = deps
        self._lifecycle = lifecycle
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
        """Brings the copy's revision into force and confirms it. While a store is away neither is done."""
        directory = self._deps.directory
        async with self._following:
            revision = directory.revision
            if revision == self._confirmed:
                return
            try:
                await self._also()
                await self._lifecycle().follow_directory()
                await self._deps.registry.serve(self._deps.gateway_id, revision)
                self._confirmed = revision
            except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
                log.warning("revision %d is not confirmed yet: %s", revision, type(error).__name__)

    async def refresh(self) -> None:
        """Brings what is stored by now into force here. Raises `DatabaseUnavailable`."""
        await self._deps.directory.refresh()
        await self.follow()

    async def changed(self) -> list[str]:
        """After an admin act: brings it into force here and waits for the other gateways, for up to
        `CONFIRM_S`. Returns the ids of those that have not confirmed it. Raises `DatabaseUnavailable`."""
        await self.refresh()
        late = await self._deps.registry.not_serving(self._deps.config.gateway_stale_s)
        return [row.gateway_id for row in late]
