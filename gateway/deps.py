"""The parts that the composition root hands to a gateway. Frozen."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gateway.background import Site
from gateway.fair_threads import FairThreads
from gateway.requests.fields.checked_answers import CheckedAnswers
from tenants.audit.log import AuditLog
from tenants.directory.gateways import GatewayRegistry, Instance
from tenants.ledger.progress import ProgressStore
from tenants.people.sessions import SessionRules
from tenants.people.store import People
from tenants.resources.all import RESOURCES
from tenants.resources.resource import Resource

if TYPE_CHECKING:
    from engine.forecast.length.length import LengthForecast
    from gateway.dispatch.queue_sharing import QueueSharing
    from gateway.domain.what_if import WhatIf
    from gateway.pools.members import Members
    from gateway.pools.peer_requests import PeerRequests
    from gateway.pools.pool import PoolSpec
    from gateway.requests.parse import Renderer
    from gateway.tracing.tracer import Tracer
    from gateway.upstream.replica_set import ReplicaSet
    from gateway.workers.workers import Workers
    from tenants.admin.admin import Admin
    from tenants.audit.note import SigningKey
    from tenants.directory.directory import Directory
    from tenants.ledger.ledger import Ledger
    from tenants.nouns.alias import Alias
    from tenants.pricing.pricing import PriceBook
    from tenants.quota.store import QuotaStore


@dataclass(frozen=True, slots=True)
class ShownSetting:
    name: str
    value: str
    """Of a secret only whether it is set."""
    source: str
    """A flag, a variable, a key of a file, a template; empty: the default."""
    meaning: str


@dataclass(frozen=True, kw_only=True)
class GatewayDeps(Site):
    """The parts that outlive a request, built and closed by the composition root."""

    directory: Directory
    admin: Admin
    ledger: Ledger
    quota_store: QuotaStore
    prices: Callable[[], PriceBook]
    """Changes while the gateway runs."""
    upstreams: ReplicaSet
    """Our engines, all of one model, and vLLMs with our plug-in: they keep outcomes, take the policy."""
    renderer: Renderer
    model_name: str
    """Of the served model, or the first one."""
    control_token: str = ""
    """Bearer token of the local CLI with all admin scopes; empty: none."""
    rebuild_counters: bool = True
    """The quota store lives and dies with this process: fill it from the ledger before serving."""
    quote_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """Signs quotes; shared by all gateways of an installation, or each knows only its own."""
    instance: Instance = field(default_factory=lambda: Instance(secrets.token_hex(8)))
    members: Members | None = None
    """Follows engines that run elsewhere; None: there are none."""
    lengths: LengthForecast | None = None
    """None: loaded from `config.data_dir`, or fresh."""
    pools: tuple[PoolSpec, ...] = ()
    """Empty: `model_name` on `upstreams` is the only one."""
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    sharing: QueueSharing | None = None
    """None: each gateway has its own queues."""
    peer_requests: PeerRequests | None = None
    """None: without Redis other gateways cannot be reached."""
    shown_settings: tuple[ShownSetting, ...] = ()
    """Without secrets."""
    what_if: WhatIf | None = None
    threads: FairThreads = field(default_factory=FairThreads)
    """Parses and tokenises prompts that are not small, and checks grammars."""
    answers: CheckedAnswers = field(default_factory=CheckedAnswers)
    resources: tuple[Resource[Any], ...] = RESOURCES
    """Nouns with their routes, pages and sections of the configuration file."""
    tracer: Tracer | None = None
    workers: Workers | None = None
    """The other workers of the port; None: this process is alone."""
    backfill: Callable[[], Literal["filled", "busy", "done"]] | None = None
    """Runs a batch of what the schema's migrations have left to fill; blocks."""
    audit_key: SigningKey | None = None
    """Signs the audit; None: other gateways do."""
    read_audit_key: Callable[[], SigningKey | None] = lambda: None
    """The current key: read when the log is signed with another one."""
    audit: AuditLog = field(init=False)
    registry: GatewayRegistry = field(init=False)
    progress: ProgressStore = field(init=False)
    people: People = field(init=False)

    def __post_init__(self) -> None:
        from gateway.pools.pool import PoolSpec

        object.__setattr__(self, "registry", GatewayRegistry(self.database, self.wall_clock))
        object.__setattr__(self, "progress", ProgressStore(self.database))
        log = AuditLog(self.database, self.audit_key, self.wall_clock, self.read_audit_key)
        object.__setattr__(self, "audit", log)
        rules = SessionRules(self.config.session_idle_s, self.config.session_max_s)
        object.__setattr__(self, "people", People(self.database, self.wall_clock, rules))
        if not self.pools:
            only = PoolSpec(self.model_name, self.upstreams, self.renderer)
            object.__setattr__(self, "pools", (only,))

    def engine_names(self) -> frozenset[str]:
        """As in the gateways' rows."""
        return frozenset(upstream.name for upstream in self.upstreams)


@dataclass(slots=True)
class RecoveryReport:
    open_reserves: int = 0
    recovered: int = 0
    """Settled by an engine's outcome."""
    lost: int = 0
    """Settled by their last report: no engine knew them."""
    left_open: int = 0
    """No engine could be reached yet."""
    acknowledged: int = 0
