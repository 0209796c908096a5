"""Evaluates alerts on the one gateway of a database that holds the lease.

Alerts whose figures cannot be read keep their state.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection

from prometheus_client import Gauge

from gateway.background import BackgroundWriter, Site
from tenants.outbox import figures, incidents
from tenants.outbox.incidents import Evaluated
from tenants.outbox.kinds import ALERT_KINDS
from tenants.outbox.transitions import Condition, Incident, ripe
from tenants.storage.task_stop import stop

LEASE_ROUNDS = 3
"""Rounds the lease holder may miss before another gateway takes over."""
LEAST_LEASE_S = 10.0

Look = Callable[[int], Awaitable[tuple[list[Condition], set[str]]]]
"""Conditions now (Unix µs), and the subjects for which they are complete. Raises `DatabaseUnavailable`."""


class AlertEvaluator(BackgroundWriter):
    task_name = "gateway alerts"
    log = logging.getLogger("fairgate.gateway.alerts")
    failed = "alerts were not evaluated; it goes on"
    unavailable = "alerts are evaluated later"
    purge_every_s = 600.0

    def __init__(self, site: Site, look: Look) -> None:
        super().__init__(site)
        self.flush_every_s = site.config.alert_every_s
        self._look = look
        self._gateway_id = site.gateway_id
        self._lease_us = round(max(LEAST_LEASE_S, LEASE_ROUNDS * self.flush_every_s) * 1e6)
        self._base_url = site.config.console_url
        self._since_us: dict[str, int] = {}
        """When this gateway first saw each condition."""
        self._by_tenant: Counter[str] = Counter()
        """Alerts that fire, as last read, by their tenant's id; empty: of the platform."""
        self._firing = Gauge(
            "fairgate_alerts_firing",
            "Alerts that fire, of all tenants, as the gateway that evaluates them says; others say none.",
            ["subject"],
            registry=site.prometheus,
        )
        self._backup_age = Gauge(
            "fairgate_backup_age_seconds",
            "Age of the newest backup; without one, of the database's first act.",
            registry=site.prometheus,
        )

    async def flush(self) -> None:
        """Evaluates once. Raises `DatabaseUnavailable`."""
        now_us = self._now_us()
        if not await self._database.write(
            lambda one: incidents.take_lease(one, self._gateway_id, now_us, self._lease_us)
        ):
            self._since_us = {}
            self._firing.clear()
            await self._read_firing()
            return
        conditions, looked_at = await self._look(now_us)
        due, since_us = ripe(conditions, self._since_us, now_us)
        # Of what could not be looked at, the wait goes on.
        self._since_us = {
            key: at_us for key, at_us in self._since_us.items() if key.partition(":")[0] not in looked_at
        } | since_us
        changed = await self._database.write(
            lambda one: incidents.evaluate(
                one, self._gateway_id, due, looked_at, now_us, self._lease_us, self._base_url
            )
        )
        if changed is None:
            return
        self._tell(changed)
        await self._database.write(lambda one: incidents.announce_checkpoints(one, now_us))
        firing = await self._read_firing()
        for kind in ALERT_KINDS:
            self._firing.labels(kind.subject).set(sum(alert.subject == kind.subject for alert in firing))

    async def _read_firing(self) -> list[Incident]:
        firing, taken_us = await self._database.read(
            lambda one: (incidents.firing(one), figures.backup_us(one))
        )
        now_us = self._now_us()
        self._backup_age.set(max(0.0, (now_us - (now_us if taken_us is None else taken_us)) / 1e6))
        problems = {alert.problem: alert.tenant_id for alert in firing if alert.silence is None}
        self._by_tenant = Counter(problems.values())
        return firing

    def firing_of(self, tenant_ids: Collection[str] | None) -> int:
        """How many problems of these tenants fire, silenced ones aside, as last read; None: of all, and of
        the platform."""
        if tenant_ids is None:
            return self._by_tenant.total()
        return sum(self._by_tenant[tenant_id] for tenant_id in tenant_ids)

    def _tell(self, changed: Evaluated) -> None:
        for alert in changed.fired:
            self.log.warning("alert %s fires: %s", alert.key, alert.summary)
        for alert in changed.resolved:
            self.log.info("alert %s is over", alert.key)
        if changed.left_out:
            self.log.error("%d alerts wait: %d fire already", changed.left_out, incidents.MAX_FIRING)

    async def purge(self) -> None:
        await self._database.write(lambda one: incidents.purge(one, self._now_us()))

    async def close(self) -> None:
        """Releases the lease."""
        if self._task is not None:
            await stop([self._task])
        with self._while_away():
            await self._database.write(lambda one: incidents.give_up_lease(one, self._gateway_id))
