"""The loop that keeps replicas of a cluster as many as wanted, and known to the gateways by rows in SQL."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ops.placement.plan import Report, Room, decide, state_of
from tenants.directory.placed_engines import PlacedEngines
from tenants.errors import DatabaseUnavailable

TURN_S = 3.0
REPORT_S = 3.0
LEASE_S = 90.0
"""How long a row holds after the last report; longer than Ray waits for its head (60 s)."""
DRAIN_POLL_S = 0.5


class ClusterUnavailable(Exception):
    """The cluster cannot be asked now, or not at all; the message says why."""


class Cluster(Protocol):
    """Machines that replicas are placed on. Its methods block, and raise `ClusterUnavailable`."""

    kind: str
    need: Mapping[str, float]
    """Resources of one replica."""

    def reports(self, within_s: float) -> dict[str, Report | None]:
        """Of all replicas; None: no answer within the time."""

    def room(self) -> Room: ...

    def start(self, name: str) -> None:
        """Has the cluster place and keep a replica; without effect where it does."""

    def end(self, name: str) -> None:
        """Ends a replica and its engine for good; without effect where there is none."""


class Rotation(Protocol):
    """A running gateway's rotation of replicas. Its methods block; what fails is said, and not raised."""

    def drain(self, name: str) -> bool: ...

    def is_empty(self, name: str) -> bool: ...

    def resume(self, name: str) -> None: ...


class Placer:
    def __init__(
        self,
        cluster: Cluster,
        rows: PlacedEngines,
        rotation: Rotation | None,
        say: Callable[[str], object],
        drain_s: float,
    ) -> None:
        """`rotation`: None where no server runs. `drain_s`: the longest wait for a replica to be empty."""
        self._cluster, self._rows, self._rotation = cluster, rows, rotation
        self._say, self._drain_s = say, drain_s
        self._said: dict[str, str] = {}

    async def run(self, wanted: Sequence[str], stop: asyncio.Event) -> None:
        """Until `stop`; replicas go on after it."""
        while not stop.is_set():
            try:
                await self.turn(wanted)
                self._said.pop("", None)
            except (ClusterUnavailable, DatabaseUnavailable) as error:
                self._say_new("", f"{error}; what runs goes on")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), TURN_S)

    async def turn(self, wanted: Sequence[str]) -> None:
        """Raises `ClusterUnavailable` and `DatabaseUnavailable`."""
        reports = await asyncio.to_thread(self._cluster.reports, REPORT_S)
        acts = decide(wanted, reports, await self._written())
        for name in acts.write:
            report = reports[name]
            assert report is not None
            await self._rows.write(
                name, report.address, LEASE_S, placed_by=self._cluster.kind, place=report.place
            )
        for name in acts.start:
            await asyncio.to_thread(self._cluster.start, name)
        room = await asyncio.to_thread(self._cluster.room) if None in reports.values() else None
        for name in wanted:
            if name in reports:
                self._say_new(name, f"{name} {state_of(reports[name], self._cluster.need, room)}")
        if acts.end:
            await self.retire(acts.end)

    async def retire(self, names: Collection[str]) -> None:
        """Drains replicas, all at once, ends and forgets them. Raises as `turn` does."""
        drained = []
        if self._rotation is not None:
            drained = [name for name in names if await asyncio.to_thread(self._rotation.drain, name)]
            end_s = asyncio.get_running_loop().time() + self._drain_s
            for name in drained:
                while not await asyncio.to_thread(self._rotation.is_empty, name):
                    if asyncio.get_running_loop().time() > end_s:
                        self._say(f"{name} is not empty after {self._drain_s:g} s: it is ended")
                        break
                    await asyncio.sleep(DRAIN_POLL_S)
        for name in names:
            await asyncio.to_thread(self._cluster.end, name)
            await self._rows.forget(name)
            self._say(f"{name} has ended")
        for name in drained:
            assert self._rotation is not None
            await asyncio.to_thread(self._rotation.resume, name)

    async def everything(self) -> set[str]:
        """Names of all replicas, placed or written. Raises as `turn` does."""
        return set(await asyncio.to_thread(self._cluster.reports, REPORT_S)) | await self._written()

    async def _written(self) -> set[str]:
        return {row.name for row in await self._rows.read() if row.placed_by == self._cluster.kind}

    def _say_new(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self._say(text)
