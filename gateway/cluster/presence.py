"""This gateway among those of its database: its heartbeat, and what dead ones and its earlier lives left."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gateway.budget.holds import Holds
from gateway.cluster import recovery
from gateway.cluster.identity import RivalWatch
from gateway.cluster.liveness import Liveness
from gateway.cluster.progress_writer import ProgressWriter
from gateway.deps import GatewayDeps, RecoveryReport
from tenants.directory.gateways import GatewaySeen, IdentityTaken
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.quota.store import QuotaStoreUnavailable
from tenants.storage.release import ReleaseTooOld
from tenants.storage.task_stop import stop

RECOVERY_RETRY_S = 2.0

log = logging.getLogger("fairgate.gateway")


class Presence:
    """Use from one event loop."""

    def __init__(self, deps: GatewayDeps, liveness: Liveness, holds: Holds, progress: ProgressWriter) -> None:
        self.report: RecoveryReport | None = None
        """What the start found of an earlier life; None: not started."""
        self.is_taken = asyncio.Event()
        """Set when another process serves under this gateway's id, or the database needs a newer release:
        this one must stop (`taken` says why)."""
        self.taken: IdentityTaken | ReleaseTooOld | None = None
        self._deps = deps
        self._liveness = liveness
        self._holds = holds
        self._progress = progress
        self._seen: list[GatewaySeen] = []
        self._dead: list[GatewaySeen] = []
        self._rival: RivalWatch | None = None
        self._adopting: dict[str, asyncio.Task[None]] = {}
        self._engine_changed = asyncio.Event()

    async def enter(self) -> None:
        """The first heartbeat. Raises `DatabaseUnavailable`, and `ReleaseTooOld` after a contract step."""
        await self._beat(takes_over=True)

    async def leave(self) -> None:
        """Removes this gateway's row, unless others have to settle what it leaves."""
        deps = self._deps
        await stop(self._adopting.values())
        with contextlib.suppress(DatabaseUnavailable):
            if not await deps.ledger.open_requests(deps.gateway_id, most=1):
                await deps.registry.forget(deps.gateway_id, instance=deps.instance)

    async def recover(self) -> None:
        """Rebuilds the counters and settles an earlier life's requests; both later if Redis is not ready.
        Raises `DatabaseUnavailable`, and `Invalid` if another gateway counts separately."""
        deps = self._deps
        deps.upstreams.each(lambda upstream: upstream.watch(self._engine_changed.set))
        # What one has left open is settled without it.
        deps.upstreams.on_left(lambda upstream: self._engine_changed.set())
        if deps.rebuild_counters:
            for row in self._seen:
                if row.gateway_id != deps.gateway_id and row.silent_s <= deps.config.gateway_stale_s:
                    raise Invalid(
                        "redis_url",
                        f"gateway {row.gateway_id} {row.address} serves this database, and each would count"
                        " limits for itself: stop it, or give both the same Redis",
                    )
        try:
            # First: while this one is not ready, what it writes keeps the record.
            self._progress.earlier = await deps.progress.read(deps.gateway_id)
            await self._holds.fill(is_new=deps.rebuild_counters)
            self.report = await recovery.recover(deps, self._progress.earlier)
            self._forget_earlier(self.report)
        except QuotaStoreUnavailable as error:
            log.warning("the quota store is not ready, nothing is admitted yet: %s", error)
            self.report = RecoveryReport()
            self._engine_changed.set()

    async def keep_recovered(self) -> None:
        """Settles outcomes that a reconnected engine still holds, until it is cancelled."""
        upstreams = self._deps.upstreams
        while True:
            await self._engine_changed.wait()
            self._engine_changed.clear()
            if upstreams and not any(upstream.is_up for upstream in upstreams):
                continue
            try:
                earlier = self._progress.earlier
                self._forget_earlier(await recovery.sweep(self._deps, self._holds.live, earlier))
            except Exception as error:
                log.warning("recovery is tried again: %s", type(error).__name__)
                await asyncio.sleep(RECOVERY_RETRY_S)
                self._engine_changed.set()

    async def beat(self) -> None:
        """Writes a heartbeat, and adopts what dead gateways left."""
        if self.is_taken.is_set():
            return
        try:
            await self._beat()
        except IdentityTaken as error:
            await self._watch_rival(error)
            return
        except ReleaseTooOld as error:  # it was silent while the database was contracted
            self._stop_for(error)
            return
        except DatabaseUnavailable as error:
            log.warning("no heartbeat could be written: %s", error)
            return
        for dead in self._dead:
            if dead.gateway_id not in self._adopting:
                self._adopting[dead.gateway_id] = asyncio.create_task(
                    self._adopt(dead), name=f"adopt {dead.gateway_id}"
                )

    async def _beat(self, *, takes_over: bool = False) -> None:
        """Raises `IdentityTaken`, `ReleaseTooOld`, `DatabaseUnavailable`."""
        deps, asked_s = self._deps, self._deps.clock()
        self._seen = await deps.registry.beat(
            deps.gateway_id, deps.address, deps.engine_names(), deps.instance, takes_over=takes_over
        )
        self._rival = None
        self._dead = self._liveness.beaten(asked_s, self._seen)

    async def _watch_rival(self, error: IdentityTaken) -> None:
        """Another process has written this gateway's heartbeat. While it is watched this one writes none, so
        after a while it starts no waiting request."""
        self._rival = self._rival or RivalWatch(self._deps.config.beat_s)
        match self._rival.look(error.taken_by, self._deps.clock()):
            case "lives":
                self._stop_for(error)
            case "still":
                await self._beat(takes_over=True)

    def _stop_for(self, error: IdentityTaken | ReleaseTooOld) -> None:
        log.error("%s", error)
        self.taken = error
        self.is_taken.set()

    async def _adopt(self, dead: GatewaySeen) -> None:
        """Runs beside the heartbeat: engines may take time to answer."""
        try:
            await recovery.adopt(self._deps, dead, self._deps.config.gateway_stale_s, self._holds.live)
        except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
            log.warning("gateway %s is adopted later: %s", dead.gateway_id, type(error).__name__)
        except Exception:
            log.exception("gateway %s could not be adopted; it is tried again", dead.gateway_id)
        finally:
            del self._adopting[dead.gateway_id]

    def _forget_earlier(self, report: RecoveryReport) -> None:
        if not report.left_open and report.open_reserves < recovery.PAGE:
            self._progress.earlier = None
