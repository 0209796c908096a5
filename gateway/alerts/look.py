"""Conditions of alerts, from the database and the live figures of all gateways."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.deps import GatewayDeps
from gateway.pools.live_counters import FleetNow
from tenants.outbox import conditions, figures, kinds, limit_conditions
from tenants.outbox.figures import SATURATED_MINUTES, DatabaseFigures
from tenants.outbox.transitions import Condition
from tenants.quota import pressure
from tenants.quota.store import LimitState, QuotaStoreUnavailable

MOST_LIMITS = 2_000
"""Counters read in one round."""


@dataclass(frozen=True)
class AlertFigures:
    deps: GatewayDeps
    fleet: Callable[[], Awaitable[FleetNow]]
    holds_overdue: Callable[[], int]
    """Of dead gateways."""
    audit_complaint: Callable[[], str]
    """Why the audit is not signed, or empty."""

    async def __call__(self, now_us: int) -> tuple[list[Condition], set[str]]:
        """The conditions, and the subjects for which they are complete. Raises `DatabaseUnavailable`."""
        stored = await self.deps.database.read(lambda one: figures.read(one, now_us))
        holding, looked_at = self._of_database(stored, now_us)
        states = await self._states(now_us)
        if states is not None:
            holding += limit_conditions.soft_limits(states, stored.soft_events, now_us)
            pressures = await self.deps.database.read(lambda one: pressure.read(one, states, now_us))
            holding += limit_conditions.exhaustions(pressures, now_us)
            looked_at |= {kinds.SOFT_LIMIT.subject, kinds.EXHAUSTION.subject}
        holding += conditions.leaked_holds(self.holds_overdue())
        looked_at.add(kinds.HOLDS_LEAKED.subject)
        fleet = await self.fleet()
        down = [
            (replica.pool, replica.replica_id, replica.name)
            for replica in fleet.replicas
            if not replica.is_up and not replica.is_drained
        ]
        holding += conditions.replicas_down(down)
        if not fleet.missing:  # else a replica that another gateway alone knows would be taken for back
            looked_at.add(kinds.REPLICA_DOWN.subject)
        return holding, looked_at

    def _of_database(self, stored: DatabaseFigures, now_us: int) -> tuple[list[Condition], set[str]]:
        config = self.deps.config
        holding = conditions.slo_burns(stored.windows, stored.targets, config.alert_misses)
        holding += conditions.expiring_keys(stored.keys, now_us)
        holding += conditions.calibration_off(stored.calibration)
        holding += conditions.saturation(stored.refused, SATURATED_MINUTES, config.alert_misses)
        holding += conditions.audit_signing(
            stored.audit_size,
            stored.audit_signed,
            stored.audit_signed_us,
            now_us,
            config.audit.checkpoint_s,
            self.audit_complaint(),
        )
        holding += conditions.backup_late(stored.backup_us, now_us, config.backup_late_s)
        looked_at = {
            kind.subject
            for kind in (
                kinds.SLO_BURN,
                kinds.KEY_EXPIRES,
                kinds.CALIBRATION,
                kinds.SATURATION,
                kinds.AUDIT_LATE,
                kinds.AUDIT_DAMAGED,
                kinds.BACKUP_LATE,
            )
        }
        if stored.ledger_check is not None:
            holding += conditions.ledger_drift(stored.ledger_check.problems)
            looked_at.add(kinds.LEDGER_DRIFT.subject)
        return holding, looked_at

    async def _states(self, now_us: int) -> list[LimitState] | None:
        """None: the quota store is unavailable."""
        every = self.deps.directory.limits(now_us / 1e6)
        wanted = limit_conditions.limits_to_look_at(every, MOST_LIMITS)
        try:
            return list(await self.deps.quota_store.states(wanted))
        except QuotaStoreUnavailable:
            return None
