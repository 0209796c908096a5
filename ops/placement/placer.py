"""The loop that keeps as many replicas on a cluster as wanted, and writes for gateways where they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ops.placement.plan import Reports, decide, state_of
from tenants.directory.placed_engines import PlacedEngines
from tenants.errors import DatabaseUnavailable

TURN_S = 3.0
LEASE_S = 90.0
"""How long a row holds without a report; longer than Ray waits for its head (60 s)."""
POLL_S = 0.5


class ClusterUnavailable(Exception):
    """The cluster cannot be asked now, or at all; the message says why."""


class Cluster(Protocol):
    """What replicas are placed on. All methods block, and raise `ClusterUnavailable`."""

    kind: str

    def reports(self) -> Reports: ...
    def lack(self) -> str: ...
    def start(self, name: str) -> None: ...
    def end(self, name: str) -> None: ...


class Placer:
    def __init__(
        self,
        cluster: Cluster,
        rows: PlacedEngines,
        ask: Callable[[str, str], dict[str, Any]],
        say: Callable[[str], object],
    ) -> None:
        """`ask`: the answer of a running server's admin API to method and path; empty: there is none."""
        self._cluster, self._rows, self._ask, self._say = cluster, rows, ask, say
        self._said: dict[str, str] = {}

    async def run(self, wanted: Sequence[str], drain_s: float) -> None:
        """For ever; what was placed goes on after it."""
        while True:
            try:
                await self.turn(wanted, drain_s)
                self._said.pop("", None)
            except (ClusterUnavailable, DatabaseUnavailable) as error:
                self._say_new("", f"{error}; what runs goes on")
            await asyncio.sleep(TURN_S)

    async def turn(self, wanted: Sequence[str], drain_s: float) -> None:
        """Raises `ClusterUnavailable` and `DatabaseUnavailable`."""
        reports, written = await self.known()
        missing, surplus, serving = decide(wanted, reports, written)
        for name, report in serving.items():
            kind, place = self._cluster.kind, report.place
            await self._rows.write(name, report.address, LEASE_S, placed_by=kind, place=place)
        for name in missing:
            await asyncio.to_thread(self._cluster.start, name)
        lack = await asyncio.to_thread(self._cluster.lack) if None in reports.values() else ""
        for name in wanted:
            if name in reports:
                self._say_new(name, f"{name} {state_of(reports[name], lack)}")
        await self.retire(surplus, drain_s)

    async def known(self) -> tuple[Reports, set[str]]:
        """What is placed, and the names in the database. Raises as `turn` does."""
        reports = await asyncio.to_thread(self._cluster.reports)
        return reports, {row.name for row in await self._rows.read() if row.placed_by == self._cluster.kind}

    async def retire(self, names: Iterable[str], drain_s: float) -> None:
        """Drains replicas, for `drain_s` at most, ends and forgets them. Raises as `turn` does."""
        drained = {name for name in names if self._ask("POST", f"/upstreams/{name}/drain")}
        for _ in range(round(drain_s / POLL_S) if drained else 0):
            rows = [
                row for pool in self._ask("GET", "/upstreams").get("data", ()) for row in pool["replicas"]
            ]
            if not any(row["replica_id"] in drained and row["state"] == "draining" for row in rows):
                break
            await asyncio.sleep(POLL_S)
        for name in names:
            await asyncio.to_thread(self._cluster.end, name)
            await self._rows.forget(name)
            if name in drained:
                self._ask("POST", f"/upstreams/{name}/resume")
            self._say(f"{name} has ended")

    def _say_new(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self._say(text)
