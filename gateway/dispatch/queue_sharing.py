"""Opens the queues that this gateway shares with others.

Gateways share a pool's queue if they have its model, replicas and Redis in common; a replica that only this
one reaches (a supervised engine) prevents that.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.config import AGEING_S, GatewayConfig
from gateway.flow.controller import FlowController
from gateway.flow.shared.codec import PoolRule, never_is_zero
from gateway.flow.shared.mirror import Mirror
from gateway.flow.shared.protocol import PoolSession
from tenants.types import Tier

if TYPE_CHECKING:
    from gateway.dispatch.control_feed import ControlFeed
    from gateway.dispatch.redis_queue import RedisQueue
    from tenants.quota.redis import Passenger


@dataclass
class QueueSharing:
    redis_url: str
    gateway_id: str
    replica_names: Mapping[str, str]
    """By replica id, the name all gateways use; only for replicas that others can reach."""
    may_go_alone: bool
    """While Redis is unavailable this gateway decides alone about its own requests."""
    queues: list[RedisQueue] = field(default_factory=list)

    def shares(self, replica_ids: Iterable[str]) -> bool:
        """Whether others can reach all of these replicas."""
        ids = list(replica_ids)
        return bool(ids) and all(replica_id in self.replica_names for replica_id in ids)

    def open(
        self,
        model: str,
        mirror: Mirror,
        config: GatewayConfig,
        clock: Callable[[], float],
        replica_ids: Iterable[str],
    ) -> RedisQueue:
        """The queue of a pool, of which `mirror` is this gateway's part."""
        # Only here, because Redis is an extra.
        from gateway.dispatch.redis_queue import RedisQueue

        names = {replica_id: self.replica_names[replica_id] for replica_id in replica_ids}
        session = PoolSession(mirror, _rule(config), secrets.randbits(40), names)
        pool = hashlib.sha256("\n".join([model, *sorted(names.values())]).encode()).hexdigest()[:24]
        queue = RedisQueue(
            self.redis_url, pool, self.gateway_id, session, clock, may_go_alone=self.may_go_alone
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


def _rule(config: GatewayConfig) -> PoolRule:
    return PoolRule(
        max_queued=config.max_queued,
        max_queued_per_tenant=config.max_queued_per_tenant,
        lookahead_sequences=config.lookahead_sequences,
        kv_window=config.kv_window,
        stale_us=round(config.gateway_stale_s * 1e6),
        ageing_s=never_is_zero(AGEING_S[tier] for tier in Tier),
        share_sequences=config.long_share_sequences,
        share_kv=config.long_share_kv,
        batch_share=config.batch_share,
        reservation_burst_s=config.reservation_burst_s,
    )
