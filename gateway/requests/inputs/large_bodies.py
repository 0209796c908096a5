"""Memory for request bodies above the ordinary limit, in all and per tenant. Pure.

A body counts until the end of its answer: a waiting request keeps it, as several servers may get it.
"""

from __future__ import annotations

from collections import Counter

from gateway import errors
from gateway.workers.tally import ALONE, Counts

SHARE_OF_ONE = 2
"""One tenant's part of the whole."""
ALL = ""
"""In the shared counts, beside the tenants."""


class LargeBodies:
    """Use from one event loop."""

    def __init__(self, most_bytes: int, shared: Counts = ALONE) -> None:
        self._most_bytes = most_bytes
        self._shared = shared
        self._of_tenant: Counter[str] = Counter()
        self.total_bytes = 0

    def take(self, tenant_id: str, num_bytes: int) -> None:
        """Raises `ApiError`: 429 if the tenant has too much already, 503 if all together have."""
        of_tenant, in_all = self._count(tenant_id, num_bytes)
        is_of_tenant = of_tenant > self._most_bytes // SHARE_OF_ONE
        if is_of_tenant or in_all > self._most_bytes:
            self._count(tenant_id, -num_bytes)
            most_bytes = self._most_bytes // SHARE_OF_ONE if is_of_tenant else self._most_bytes
            raise errors.large_bodies_full(most_bytes, of_tenant=is_of_tenant)

    def give_back(self, tenant_id: str, num_bytes: int) -> None:
        self._count(tenant_id, -num_bytes)

    def _count(self, tenant_id: str, num_bytes: int) -> tuple[int, int]:
        """The bytes of the tenant, and all, with those of other workers."""
        self.total_bytes += num_bytes
        self._of_tenant[tenant_id] += num_bytes
        used = self._of_tenant[tenant_id]
        if used <= 0:
            del self._of_tenant[tenant_id]
        others = self._shared.add(tenant_id, num_bytes)
        return used + others, self.total_bytes + self._shared.add(ALL, num_bytes)


class LargeBody:
    """One body's share, as it grows."""

    def __init__(self, bodies: LargeBodies, tenant_id: str, ordinary_bytes: int) -> None:
        """A body of at most `ordinary_bytes` is not counted."""
        self._bodies = bodies
        self._tenant_id = tenant_id
        self._ordinary_bytes = ordinary_bytes
        self._taken = 0

    def __enter__(self) -> LargeBody:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_counted(self) -> bool:
        return self._taken > 0

    def grow(self, num_bytes: int) -> None:
        """Reserves memory for a body of this many bytes. Raises as `LargeBodies.take`."""
        if num_bytes > max(self._taken, self._ordinary_bytes):
            self._bodies.take(self._tenant_id, num_bytes - self._taken)
            self._taken = num_bytes

    def close(self) -> None:
        if self._taken:
            self._bodies.give_back(self._tenant_id, self._taken)
            self._taken = 0
