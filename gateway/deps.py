"""Parts that the composition root hands to a gateway. Frozen."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.config import GatewayConfig
from gateway.fair_threads import FairThreads
from tenants.audit.log import AuditLog
from tenants.directory.gateways import GatewayRegistry, Instance
from tenants.ledger.progress import ProgressStore
from tenants.people.sessions import SessionRules
from tenants.people.store import People
from tenants.people.way_in import WayIn

if TYPE_CHECKING:
    from engine.forecast.length.length import LengthForecast
    from gateway.dispatch.queue_sharing import QueueSharing
    from gateway.domain.what_if import WhatIf
    from gateway.pools.catalogue import Alias
    from gateway.pools.peer_requests import PeerRequests
    from gateway.pools.pool import PoolSpec
    from gateway.requests.parse import Renderer
    from gateway.tracing.tracer import Tracer
    from gateway.upstream.base import Upstream
    from tenants.admin.admin import Admin
    from tenants.audit.note import SigningKey
    from tenants.directory.directory import Directory
    from tenants.ledger.ledger import Ledger
    from tenants.pricing.pricing import PriceBook
    from tenants.quota.store import QuotaStore
    from tenants.storage.database import Database

__all__ = ["GatewayConfig", "GatewayDeps"]


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """A setting of this process, for people to read."""

    name: str
    value: str
    """As it would be written; of a secret only whether it is set."""
    source: str
    """What set it: a flag, a variable, a key of a file, a template; empty: it is the default."""
    meaning: str


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
    """Those that keep outcomes, which recovery asks for, and take the policy: each engine of our own, all of
    the same model, and each vLLM with our plug-in."""
    renderer: Renderer
    model_name: str
    """The name in the API of the model that is served, or of the first one."""
    control_token: str = ""
    """Bearer of the local CLI with all admin scopes; empty: none."""
    rebuild_counters: bool = True
    """The quota store lives and dies with this process: fill it from the ledger before serving."""
    quote_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Signs quotes; the same in every gateway of an installation, or each knows only its own."""
    instance: Instance = field(default_factory=lambda: Instance(secrets.token_hex(8)))
    """This process, among all that ever served under `gateway_id`."""
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
    shown_settings: tuple[ShownSetting, ...] = ()
    """Every setting of this process, without secrets."""
    what_if: WhatIf | None = None
    """Runs what-ifs for the console; None: there is no simulator here."""
    threads: FairThreads = field(default_factory=FairThreads)
    """Where prompts that are not small are parsed and tokenised."""
    tracer: Tracer | None = None
    """Keeps traces; None: none are kept."""
    audit_key: SigningKey | None = None
    """What the audit is signed with; None: other gateways sign it."""
    read_audit_key: Callable[[], SigningKey | None] = lambda: None
    """The same as it is kept now: asked for once the log is signed with another one."""
    audit: AuditLog = field(init=False)
    """The audit as a log."""
    registry: GatewayRegistry = field(init=False)
    """Which gateways live."""
    progress: ProgressStore = field(init=False)
    """What the running requests of each gateway have used."""
    people: People = field(init=False)
    """Who is logged in to the console."""
    way_in: WayIn = field(init=False)
    """How people log in."""

    def __post_init__(self) -> None:
        from gateway.pools.pool import PoolSpec

        object.__setattr__(self, "registry", GatewayRegistry(self.database, self.wall_clock))
        object.__setattr__(self, "progress", ProgressStore(self.database))
        log = AuditLog(self.database, self.audit_key, self.wall_clock, self.read_audit_key)
        object.__setattr__(self, "audit", log)
        rules = SessionRules(self.config.session_idle_s, self.config.session_max_s)
        object.__setattr__(self, "people", People(self.database, self.wall_clock, rules))
        object.__setattr__(self, "way_in", WayIn(self.people, self.clock))
        if not self.pools:
            only = PoolSpec(self.model_name, self.upstreams, self.renderer)
            object.__setattr__(self, "pools", (only,))

    def engine_names(self) -> frozenset[str]:
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
