"""Opens the queues that this gateway shares with others.

Gateways share the queue of a pool when they have its model, its replicas and their Redis in common. A replica
that only this gateway reaches (an engine that it supervises itself) has no name that others know, and its
queue stays here.
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
    """What this gateway's queues need to be shared."""

    redis_url: str
    gateway_id: str
    replica_names: Mapping[str, str]
    """By replica id, what every gateway calls it; only of those that others can reach, too."""
    may_go_alone: bool
    """While Redis is away this gateway decides about its own requests by itself."""
    queues: list[RedisQueue] = field(default_factory=list)

    def shares(self, replica_ids: Iterable[str]) -> bool:
        """Whether others can reach every one of these replicas."""
        ids = list(replica_ids)
        return bool(ids) and all(each in self.replica_names for each in ids)

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

        names = {each: self.replica_names[each] for each in replica_ids}
        session = PoolSession(mirror, _rule(config), secrets.randbits(40), names)
        pool = hashlib.sha256("\n".join([model, *sorted(names.values())]).encode()).hexdigest()[:24]
        queue = RedisQueue(
            self.redis_url, pool, self.gateway_id, session, clock, may_go_alone=self.may_go_alone
        )
        self.queues.append(queue)
        return queue

    @property
    def is_broken(self) -> bool:
        """Redis takes nothing from this gateway for some queue."""
        return any(queue.is_broken for queue in self.queues)

    def control(self, flow: FlowController) -> ControlFeed | None:
        """How gateways agree on the knobs of the queue of which `flow` is this one's part; None: it is this
        one's own."""
        return next((queue.control for queue in self.queues if queue.flow is flow), None)

    def board(self) -> Passenger | None:
        """The next message of some queue, for a caller that sends something to Redis anyway."""
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
