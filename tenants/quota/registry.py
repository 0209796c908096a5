"""Registry in Redis of the epoch and of the tenants that have counters, the platform among them.

One hash, so that it is lost as a whole or not at all:

    fairgate:registry   epoch      named by the rebuild that filled the counters; missing: lost
                        t:ten_…    `in` when the tenant has counters of this epoch, `joining` just before that
                        owner, until_us, attempt      of a rebuild under way

Every tenant's counters carry the epoch as well, and each script compares it with its caller's. Where it is
missing, `join` finds out why: a tenant used for the first time starts with empty counters; in any other case
something was lost, and nothing is admitted until one owner has rebuilt everything.

A server that comes back with an old copy of its data (a dump, a replica that took over, the last second of an
append-only file missing) looks complete. So the server that was filled is recorded:

    fairgate:server     the `run_id` of that process, which every start changes

and every new connection checks that it is still the same (`prove`). If not, everything is rebuilt. In a
Redis Cluster there is one of each master, and both keys carry the hash tag `{registry}`, so they lie in one
slot; with one server their names are those of earlier versions. A rebuild there also drops the counters of
tenants that the registry does not know, as it may be lost without them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from tenants.quota import wire
from tenants.quota.store import QuotaStoreRecovering
from tenants.storage.redis_client import is_cluster

log = logging.getLogger("fairgate.tenants.quota")

IN = b"in"
_FIELD = "t:"

Call = Callable[[str, list[str], list[Any]], Awaitable[list[Any]]]
"""Calls a script by name, with keys and arguments."""
OnTenant = Callable[[str, str, list[Any]], Awaitable[list[Any]]]
"""Calls a script by name on a tenant's counters."""


class Registry:
    def __init__(self, client: Any, prefix: str, call: Call, on_tenant: OnTenant) -> None:
        self._client = client
        self._on_tenant = on_tenant
        self._is_cluster = is_cluster(client)
        self._prefix = prefix
        tagged = f"{prefix}:{{registry}}" if self._is_cluster else prefix
        self._key = f"{tagged}:registry"
        self._server_key = f"{tagged}:server"
        self._servers = ""
        """The `run_id` of each server when this process began to rebuild."""
        self._call = call
        self.attempt = 0
        """Number of this process's rebuild; 0: none under way."""

    async def join(self, tenant_id: str) -> str:
        """Adds the tenant to the current epoch and returns it. Raises `QuotaStoreRecovering`."""
        state, *rest = await self._call("join", [self._key], [_FIELD + tenant_id])
        if state == b"lost":
            raise recovering()
        epoch = str(rest[0].decode())
        if state != IN:
            # Nothing is held before the second step, so a half-done join may be repeated.
            await self._on_tenant("enter", tenant_id, [epoch])
            await self._client.hset(self._key, _FIELD + tenant_id, IN)
        return epoch

    async def lose(self, epoch: str) -> None:
        """Ends this epoch: its counters are no longer complete."""
        await self._call("lose", [self._key], [epoch])

    async def read(self) -> tuple[str, list[str]]:
        """The epoch and the tenants with counters. Raises `QuotaStoreRecovering`."""
        epoch, fields = (
            await self._client.pipeline(transaction=False).hget(self._key, "epoch").hkeys(self._key).execute()
        )
        if epoch is None:
            raise recovering()
        return epoch.decode(), _tenants(fields)

    async def prove(self, node: str) -> None:
        """Raises `QuotaStoreRecovering` when the server is not one that was filled. The epoch is read
        first: after the epoch of a finished rebuild, its servers are read as well."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hget(self._key, "epoch").get(self._server_key)
        if self._is_cluster:
            epoch, filled = await pipeline.execute()
            server = (await self._client.info_of_servers([node]))[node]
        else:
            epoch, filled, server = await pipeline.info("server").execute()
        if filled is None or str(server.get("run_id", "")) not in filled.decode().split(","):
            if epoch is not None:
                log.warning("Redis was started again: what it remembers may be old, the counters are rebuilt")
                await self.lose(epoch.decode())
            raise recovering()

    async def begin(self, owner: str, ttl_s: float) -> bool:
        if self._is_cluster:
            servers = list((await self._client.info_of_servers()).values())
        else:
            servers = [await self._client.info("server")]
        self._servers = ",".join(str(server.get("run_id", "")) for server in servers)
        reply = await self._call("begin", [self._key], [owner, wire.lease_us(ttl_s)])
        if reply[0] != b"begun":
            return False
        self.attempt = int(reply[1])
        return True

    async def enter(self, tenant_id: str) -> int:
        """Adds a tenant to fill; returns the attempt. Raises `QuotaStoreRecovering` unless rebuilding."""
        # The registry decides: in a cluster a tenant's slot does not know of a later attempt.
        if self.attempt:
            reply = await self._call("fill", [self._key], [self.attempt, _FIELD + tenant_id])
            if reply[0] == IN:
                return self.attempt
            self.attempt = 0
        raise recovering()

    async def entered(self) -> list[str]:
        """All registered tenants, also while the epoch is missing."""
        return _tenants(await self._client.hkeys(self._key))

    async def unregistered(self) -> list[str]:
        """Tenants of a cluster with counters, of whatever epoch, that the registry does not know."""
        if not self._is_cluster:
            return []
        before, after = f"{self._prefix}:{{", "}:counters"
        found: set[str] = set()
        async for key in self._client.scan_nodes(f"{before}*{after}"):
            found.add(key.decode().removeprefix(before).removesuffix(after))
        return sorted(found.difference(await self.entered()))

    async def finish(self, epoch: str) -> None:
        """Finishes a rebuild. Raises `QuotaStoreRecovering` when the right was lost meanwhile."""
        attempt, self.attempt = self.attempt, 0
        reply = await self._call("finish", [self._key, self._server_key], [attempt, epoch, self._servers])
        if reply[0] != b"finished":
            raise recovering()


def recovering() -> QuotaStoreRecovering:
    return QuotaStoreRecovering("Redis has lost its counters; they must be rebuilt from the ledger")


def _tenants(fields: list[bytes]) -> list[str]:
    names = (field.decode() for field in fields)
    return sorted(name.removeprefix(_FIELD) for name in names if name.startswith(_FIELD))
