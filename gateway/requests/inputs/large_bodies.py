"""Memory for request bodies above the ordinary limit, in all and per tenant. Pure.

A body counts until the end of its answer: a waiting request keeps it, as several servers may get it.
"""

from __future__ import annotations

from collections import Counter

from gateway import errors

SHARE_OF_ONE = 2
"""One tenant's part of the whole."""


class LargeBodies:
    """Use from one event loop."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._of_tenant: Counter[str] = Counter()
        self.total_bytes = 0

    def take(self, tenant_id: str, num_bytes: int) -> None:
        """Raises `ApiError`: 429 if the tenant has too much already, 503 if all together have."""
        if self._of_tenant[tenant_id] + num_bytes > self._most_bytes // SHARE_OF_ONE:
            raise errors.large_bodies_full(self._most_bytes // SHARE_OF_ONE, of_tenant=True)
        if self.total_bytes + num_bytes > self._most_bytes:
            raise errors.large_bodies_full(self._most_bytes, of_tenant=False)
        self._of_tenant[tenant_id] += num_bytes
        self.total_bytes += num_bytes

    def give_back(self, tenant_id: str, num_bytes: int) -> None:
        self.total_bytes -= num_bytes
        self._of_tenant[tenant_id] -= num_bytes
        if self._of_tenant[tenant_id] <= 0:
            del self._of_tenant[tenant_id]


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
