"""Parts that the composition root hands to a gateway. Frozen."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.config import GatewayConfig
from tenants.directory.gateways import GatewayRegistry

if TYPE_CHECKING:
    from engine.forecast.length.length import LengthForecast
    from gateway.dispatch.queue_sharing import QueueSharing
    from gateway.pools.catalogue import Alias
    from gateway.pools.peer_requests import PeerRequests
    from gateway.pools.pool import PoolSpec
    from gateway.requests.parse import Renderer
    from gateway.upstream.base import Upstream
    from tenants.admin.admin import Admin
    from tenants.directory.directory import Directory
    from tenants.ledger.ledger import Ledger
    from tenants.pricing.pricing import PriceBook
    from tenants.quota.store import QuotaStore
    from tenants.storage.database import Database

__all__ = ["GatewayConfig", "GatewayDeps"]


@dataclass(frozen=True)
class GatewayDeps:
    """The parts that outlive a request.

    The composition root builds and closes what is passed in; `create_app` starts and stops what the
    gateway itself owns (queue, dispatcher, settlements).
    """

    config: GatewayConfig
    gateway_id: str
    """Stable over restarts: open reserves are found by it."""
    database: Database
    directory: Directory
    admin: Admin
    ledger: Ledger
    quota_store: QuotaStore
    prices: Callable[[], PriceBook]
    """The price book in force; it changes while the gateway runs."""
    upstreams: tuple[Upstream, ...]
    """One for each engine of our own, all of the same model: they keep outcomes, which recovery asks for."""
    renderer: Renderer
    model_name: str
    """The name in the API of the model that is served, or of the first one."""
    control_token: str = ""
    """Bearer of the local CLI with all admin scopes; empty: none."""
    rebuild_counters: bool = True
    """The quota store lives and dies with this process: fill it from the ledger before serving."""
    quote_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Signs quotes; the same in every gateway of an installation, or each knows only its own."""
    address: str = ""
    """Where this gateway serves; for people."""
    engine_addresses: tuple[str, ...] = ()
    """One for each upstream, unique among all gateways of the database; empty: the replica ids are."""
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    lengths: LengthForecast | None = None
    """None: loaded from `config.data_dir`, or fresh."""
    pools: tuple[PoolSpec, ...] = ()
    """Every served model; empty: `model_name` on `upstreams` is the only one."""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    """Other names of models."""
    sharing: QueueSharing | None = None
    """How queues are shared with other gateways; None: each gateway has its own."""
    peer_requests: PeerRequests | None = None
    """How other gateways are asked about their requests; None: without a Redis they are not."""
    registry: GatewayRegistry = field(init=False)
    """Which gateways live."""

    def __post_init__(self) -> None:
        from gateway.pools.pool import PoolSpec

        object.__setattr__(self, "registry", GatewayRegistry(self.database, self.wall_clock))
        if not self.pools:
            only = PoolSpec(self.model_name, self.upstreams, self.renderer)
            object.__setattr__(self, "pools", (only,))

    def engine_names(self) -> frozenset[str]:
        """The engines that this gateway can send requests to."""
        return frozenset(self.engine_addresses or (upstream.replica_id for upstream in self.upstreams))


@dataclass(slots=True)
class RecoveryReport:
    """What was found and done."""

    open_reserves: int = 0
    recovered: int = 0
    """Settled by an engine's word."""
    lost: int = 0
    """Settled by their last report: no engine knew of them."""
    left_open: int = 0
    """No engine could be asked yet."""
    acknowledged: int = 0
