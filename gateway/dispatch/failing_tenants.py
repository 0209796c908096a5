"""Backs off tenants whose requests keep failing at a server that answers others. Pure.

Counts consecutive failures that are the request's own by the server's probe (`UpstreamFailed.is_requests`).
From `free` on the tenant's requests are refused but for one after each pause, which doubles with each
failure. A success, or a long time without failure, resets all.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackOffRule:
    """Free consecutive failures, and the pauses after them."""

    free: int = 5
    first_s: float = 1.0
    longest_s: float = 30.0
    forget_after_s: float = 120.0
    most_tenants: int = 1024
    """Remembered tenants; beyond it the one that failed longest ago is forgotten."""


class TenantHeldOff(Exception):
    """Too many of this tenant's requests failed in a row. `why`: the last failure."""

    def __init__(self, failures: int, why: str, retry_after_s: float) -> None:
        super().__init__(f"{failures} requests of this tenant failed in a row: {why}")
        self.failures = failures
        self.why = why
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class _Failing:
    failures: int
    why: str
    failed_s: float
    pauses: int = 0
    """So far; 0: it does not wait."""
    until_s: float = 0.0
    is_tried: bool = False
    """A request was let in after the last pause."""


class FailingTenants:
    """Of one pool. One writer."""

    def __init__(self, rule: BackOffRule | None = None) -> None:
        self._rule = rule or BackOffRule()
        self._tenants: dict[str, _Failing] = {}
        """Ordered by last failure."""

    def __len__(self) -> int:
        return len(self._tenants)

    def check(self, tenant_id: str, now_s: float) -> None:
        """Raises `TenantHeldOff` while the tenant waits."""
        found = self._tenants.get(tenant_id)
        if found is None or not found.pauses:
            return
        if now_s - found.failed_s > self._rule.forget_after_s:
            del self._tenants[tenant_id]
            return
        if now_s < found.until_s:
            raise TenantHeldOff(found.failures, found.why, found.until_s - now_s)
        # This one is let in; the others wait for what becomes of it, or for as long again.
        found.is_tried, found.until_s = True, now_s + self._pause_s(found.pauses)

    def succeeded(self, tenant_id: str) -> None:
        self._tenants.pop(tenant_id, None)

    def failed(self, tenant_id: str, why: str, now_s: float) -> bool:
        """A request failed by its own fault; returns whether its tenant starts waiting."""
        found = self._tenants.pop(tenant_id, None)
        if found is None or now_s - found.failed_s > self._rule.forget_after_s:
            found = _Failing(0, why, now_s)
        self._tenants[tenant_id] = found
        if len(self._tenants) > self._rule.most_tenants:
            del self._tenants[next(iter(self._tenants))]
        found.failures, found.why, found.failed_s = found.failures + 1, why, now_s
        # What came in before the pause counts, and does not lengthen it.
        if not found.is_tried and (found.pauses or found.failures < self._rule.free):
            return False
        found.pauses, found.is_tried = found.pauses + 1, False
        found.until_s = now_s + self._pause_s(found.pauses)
        return found.pauses == 1

    def _pause_s(self, pauses: int) -> float:
        return min(self._rule.longest_s, self._rule.first_s * 2.0 ** min(pauses - 1, 30))
