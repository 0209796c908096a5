"""Opens the queues that this gateway shares with others.

Gateways share a pool's queue if they have its model and Redis in common; each is sent to its own replicas. A
replica that only this one reaches (a supervised engine) prevents that.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.background import Site
from gateway.flow.controller import FlowController
from gateway.flow.shared.codec import PoolRule
from gateway.flow.shared.mirror import Mirror
from gateway.flow.shared.protocol import PoolSession
from gateway.upstream.replica_set import ReplicaSet

if TYPE_CHECKING:
    from gateway.dispatch.control_feed import ControlFeed
    from gateway.dispatch.load_feed import LoadReports
    from gateway.dispatch.redis_queue import RedisQueue
    from tenants.quota.redis_calls import Passenger


@dataclass
class QueueSharing:
    redis_url: str
    gateway_id: str
    may_go_alone: bool
    """While Redis is unavailable this gateway decides alone about its own requests."""
    queues: list[RedisQueue] = field(default_factory=list)

    def shares(self, replicas: ReplicaSet) -> bool:
        """Whether others can reach all of these replicas: what one has to itself is not called by its id."""
        return (bool(replicas) or replicas.may_change) and all(
            upstream.name == upstream.replica_id for upstream in replicas
        )

    def open(self, site: Site, model: str, mirror: Mirror, reports: LoadReports) -> RedisQueue:
        """The queue of a model, of which `mirror` is this gateway's part. `reports`: of its load."""
        # Only here, because Redis is an extra.
        from gateway.dispatch.redis_queue import RedisQueue

        rule = PoolRule.of(mirror.settings, round(site.config.gateway_stale_s * 1e6))
        session = PoolSession(mirror, rule, secrets.randbits(40))
        pool = hashlib.sha256(model.encode()).hexdigest()[:24]
        queue = RedisQueue(
            self.redis_url,
            pool,
            self.gateway_id,
            session,
            site.clock,
            may_go_alone=self.may_go_alone,
            reports=reports,
        )
        self.queues.append(queue)
        return queue

    @property
    def is_broken(self) -> bool:
        """Redis refuses this gateway for some queue."""
        return any(queue.is_broken for queue in self.queues)

    def control(self, flow: FlowController) -> ControlFeed | None:
        """None: the queue of `flow` is not shared."""
        return next((queue.control for queue in self.queues if queue.flow is flow), None)

    def board(self) -> Passenger | None:
        """The next message of some queue, to be sent along with another call to Redis."""
        for queue in self.queues:
            passenger = queue.board()
            if passenger is not None:
                return passenger
        return None
