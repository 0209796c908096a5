"""Keeps drained replicas from getting new requests.

Stored drains apply to all gateways of a database. A gateway confirms a revision only after applying its
drains, so a confirmed drain holds everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gateway.deps import GatewayDeps
from gateway.pools.pool import ModelPool
from gateway.upstream.base import Upstream
from tenants.admin.platform.drains import Drain

log = logging.getLogger("fairgate.gateway.drains")


class ActiveDrains:
    def __init__(self, deps: GatewayDeps, pools: Mapping[str, ModelPool]) -> None:
        """`pools` may be filled later, before the first `follow`."""
        self.now: tuple[Drain, ...] = ()
        """All that are stored, also of other gateways' replicas."""
        self._deps = deps
        self._pools = pools
        self._drained: frozenset[tuple[str, str]] = frozenset()
        self._seen_revision = -1

    def tell(self, pool: str, upstream: Upstream) -> None:
        """A replica that has joined."""
        if (pool, upstream.name) in self._drained:
            upstream.set_drained(True)

    async def follow(self) -> None:
        """Raises `DatabaseUnavailable`."""
        revision = self._deps.directory.revision
        if revision == self._seen_revision:
            return
        self.now = tuple(await self._deps.admin.drains.all())
        before, self._drained = self._drained, frozenset(drain.identity for drain in self.now)
        for pool in self._pools.values():
            for upstream in pool.spec.upstreams:
                is_drained = (pool.name, upstream.name) in self._drained
                if is_drained != ((pool.name, upstream.name) in before):
                    what = "drained: it gets no new requests" if is_drained else "back in rotation"
                    log.warning("replica %s of %s is %s", upstream.replica_id, pool.name, what)
                    upstream.set_drained(is_drained)
        self._seen_revision = revision
