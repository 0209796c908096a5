"""The drains in force: which replicas get no new requests, in every gateway.

Stored drains are those of all gateways of a database; the directory's revision shows a change. A gateway
confirms a revision only once it has followed its drains, so a drain that is answered holds everywhere but at
the gateways that the answer names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from gateway.deps import GatewayDeps
from gateway.pools.pool import ModelPool
from tenants.admin.drains import Drain

log = logging.getLogger("fairgate.gateway.drains")


class ActiveDrains:
    """The drained replicas of one gateway's pools. Use from one event loop."""

    def __init__(self, deps: GatewayDeps, pools: Callable[[], Collection[ModelPool]]) -> None:
        self.now: tuple[Drain, ...] = ()
        """All that are stored, also of replicas that this gateway does not have."""
        self._deps = deps
        self._pools = pools
        self._seen_revision = -1

    async def follow(self) -> None:
        """Takes over what was drained or resumed anywhere. Raises `DatabaseUnavailable`."""
        revision = self._deps.directory.revision
        if revision == self._seen_revision:
            return
        self.now = tuple(await self._deps.admin.list_drains())
        drained = {drain.identity for drain in self.now}
        for pool in self._pools():
            for upstream in pool.spec.upstreams:
                is_drained = (pool.name, upstream.address) in drained
                if is_drained != upstream.is_drained:
                    what = "drained: it gets no new requests" if is_drained else "back in rotation"
                    log.warning("replica %s of %s is %s", upstream.replica_id, pool.name, what)
                    upstream.set_drained(is_drained)
        self._seen_revision = revision
