"""`ReplicaSet`: the replicas of a pool, a set that changes while the gateway runs.

Read it anew each time; what needs to know of each replica registers with `each` and `on_left`. One writer:
what follows the sources of members (`gateway/pools/members.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gateway.upstream.base import Upstream

OnReplica = Callable[[Upstream], object]


class ReplicaSet:
    """Use from one event loop."""

    def __init__(self, replicas: Iterable[Upstream] = (), *, may_change: bool = False) -> None:
        """`may_change`: replicas may join later, so that what depends on their number must count on more."""
        self._replicas = list(replicas)
        self._on_joined: list[OnReplica] = []
        self._on_left: list[OnReplica] = []
        self.may_change = may_change

    def __iter__(self) -> Iterator[Upstream]:
        return iter(tuple(self._replicas))

    def __len__(self) -> int:
        return len(self._replicas)

    def __contains__(self, upstream: object) -> bool:
        return upstream in self._replicas

    def named(self, replica_id: str) -> Upstream | None:
        return next((upstream for upstream in self._replicas if upstream.replica_id == replica_id), None)

    def each(self, callback: OnReplica) -> None:
        """Calls back with every replica, those there now and those that join."""
        self._on_joined.append(callback)
        for upstream in self:
            callback(upstream)

    def on_left(self, callback: OnReplica) -> None:
        """Calls back with a replica that was removed."""
        self._on_left.append(callback)

    def add(self, upstream: Upstream) -> None:
        """Raises `ValueError` for a name that is there."""
        if self.named(upstream.replica_id) is not None:
            raise ValueError(f"a replica is called {upstream.replica_id!r} already")
        self._replicas.append(upstream)
        for callback in self._on_joined:
            callback(upstream)

    def remove(self, upstream: Upstream) -> None:
        """Nothing if it is not there."""
        if upstream in self._replicas:
            self._replicas.remove(upstream)
            for callback in self._on_left:
                callback(upstream)

    def beside(self, others: Iterable[Upstream]) -> ReplicaSet:
        """This set, as it changes, with fixed others behind."""
        whole = ReplicaSet((*self, *others), may_change=self.may_change)
        self._on_joined.append(whole.add)
        self._on_left.append(whole.remove)
        return whole
