"""Gateways of a vLLM server: which are live, their sequences, outcomes and service.

Pure: time is passed in, in seconds of a monotonic clock. A gateway is one `gateway_id`; a new *session* of it
is another process, which takes over what the one before it left.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.messages import TenantShare
from engine.vllm_plugin.protocol import MAX_REPORTED_TENANTS, SequenceNews

MAX_GATEWAYS = 64
MAX_SUPERSEDED = 256
MAX_OUTCOMES = 20_000
"""Outcomes of one gateway that were not acknowledged; beyond it the oldest are forgotten, and counted."""
MAX_EARLY = 10_000
EARLY_S = 120.0
"""How long a command for a sequence yet to arrive is kept: longer than its signature is valid."""


@dataclass(slots=True)
class EarlyWord:
    """A top-up or cancel before its sequence: the channel overtakes requests waiting in the API server."""

    said_s: float
    lease_tokens: int = 0
    cause: str = ""


@dataclass(slots=True, eq=False)
class LiveSequence:
    """A sequence that a gateway signed, until it ends."""

    sequence_id: str
    request_id: str
    tenant_id: str
    tier: int
    prompt_tokens: int
    lease_tokens: int
    arrived_s: float
    gateway: ChannelGateway
    index: int = 0
    state: str = "waiting"
    emitted_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens, those found in a cache left out."""
    changed: int = 0
    """Position of the first report with its present state."""
    told: tuple[str, int, int] | None = None
    """State, tokens and lease as last reported."""

    @property
    def is_used_up(self) -> bool:
        return self.emitted_tokens >= self.lease_tokens


@dataclass(slots=True)
class UntoldService:
    """Service of one tenant, of one gateway's sequences."""

    computed_tokens: int = 0
    emitted_tokens: int = 0
    serials: dict[int, int] = field(default_factory=dict)
    lifts: dict[int, int] = field(default_factory=dict)

    def add(self, other: UntoldService) -> None:
        self.computed_tokens += other.computed_tokens
        self.emitted_tokens += other.emitted_tokens
        self.serials = other.serials or self.serials
        for tier, amount in other.lifts.items():
            self.lifts[tier] = self.lifts.get(tier, 0) + amount


class ServiceLog:
    """Service that a gateway was not told, or has not confirmed. Each token is in one of two sums: the last
    report's, and what came after it. The next report repeats a lost one."""

    def __init__(self) -> None:
        self._told: dict[str, UntoldService] = {}
        self._fresh: dict[str, UntoldService] = {}
        self._told_at = 0

    def add(self, tenant_id: str, service: UntoldService) -> None:
        self._fresh.setdefault(tenant_id, UntoldService()).add(service)

    def take(self, heard: int, position: int) -> dict[str, TenantShare]:
        """Service by tenant since the report at `heard`, bounded, for the report at `position`."""
        if heard >= self._told_at:
            self._told = {}
        for tenant_id in list(self._fresh):
            if tenant_id in self._told or len(self._told) < MAX_REPORTED_TENANTS:
                self._told.setdefault(tenant_id, UntoldService()).add(self._fresh.pop(tenant_id))
        self._told_at = position
        return {
            tenant_id: TenantShare(
                share.computed_tokens, share.emitted_tokens, share.serials, dict(share.lifts)
            )
            for tenant_id, share in self._told.items()
        }


@dataclass(slots=True, eq=False)
class ChannelGateway:
    gateway_id: str
    session: str
    heard_s: float
    live: dict[str, LiveSequence] = field(default_factory=dict)
    tenants: Counter[str] = field(default_factory=Counter)
    outcomes: OrderedDict[str, SequenceNews] = field(default_factory=OrderedDict)
    """By sequence, in order of their ends, until they are acknowledged."""
    service: ServiceLog = field(default_factory=ServiceLog)
    lost_outcomes: int = 0
    """Those that had to be forgotten before they were acknowledged."""
    early: OrderedDict[str, EarlyWord] = field(default_factory=OrderedDict)

    def own(self, sequence: LiveSequence) -> None:
        sequence.gateway = self
        self.live[sequence.sequence_id] = sequence
        self.tenants[sequence.tenant_id] += 1

    def release(self, sequence: LiveSequence) -> None:
        del self.live[sequence.sequence_id]
        self.tenants[sequence.tenant_id] -= 1
        if not self.tenants[sequence.tenant_id]:
            del self.tenants[sequence.tenant_id]

    @property
    def is_empty(self) -> bool:
        return not self.live and not self.outcomes

    def say_early(self, sequence_id: str, mono_s: float, *, lease_tokens: int = 0, cause: str = "") -> None:
        """Keeps a command for a sequence that is not here yet."""
        word = self.early.pop(sequence_id, None) or EarlyWord(mono_s)
        word.said_s = mono_s
        word.lease_tokens = max(word.lease_tokens, lease_tokens)
        word.cause = word.cause or cause
        self.early[sequence_id] = word
        while len(self.early) > MAX_EARLY or next(iter(self.early.values())).said_s < mono_s - EARLY_S:
            self.early.popitem(last=False)

    def keep(self, sequence_id: str, news: SequenceNews) -> None:
        self.outcomes[sequence_id] = news
        while len(self.outcomes) > MAX_OUTCOMES:
            self.outcomes.popitem(last=False)
            self.lost_outcomes += 1


class GatewayRefused(Exception):
    """A gateway is not taken: `code` is `superseded` or `too_many_gateways`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class KnownGateways:
    """The gateways of a server."""

    def __init__(self, *, timeout_s: float, most: int = MAX_GATEWAYS) -> None:
        self._timeout_s = timeout_s
        self._most = most
        self._gateways: dict[str, ChannelGateway] = {}
        self._superseded: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __iter__(self) -> Iterator[ChannelGateway]:
        return iter(list(self._gateways.values()))

    def is_silent(self, gateway: ChannelGateway, mono_s: float) -> bool:
        return mono_s - gateway.heard_s > self._timeout_s

    def heard_lately(self, mono_s: float) -> list[str]:
        return [
            gateway.gateway_id for gateway in self._gateways.values() if not self.is_silent(gateway, mono_s)
        ]

    def hear(self, gateway_id: str, session: str, mono_s: float) -> tuple[ChannelGateway, bool]:
        """The gateway, with its last life's sequences, and whether this is new. Raises `GatewayRefused`."""
        gateway = self._gateways.get(gateway_id)
        if gateway is not None and gateway.session == session:
            gateway.heard_s = mono_s
            return gateway, False
        if (gateway_id, session) in self._superseded:
            raise GatewayRefused(
                "superseded",
                f"another process has connected as gateway {gateway_id!r}: give each an id of its own",
            )
        if gateway is None:
            self._make_room(mono_s)
            gateway = self._gateways[gateway_id] = ChannelGateway(gateway_id, session, mono_s)
            return gateway, True
        self._superseded[gateway_id, gateway.session] = None
        if len(self._superseded) > MAX_SUPERSEDED:
            self._superseded.popitem(last=False)
        gateway.session, gateway.heard_s = session, mono_s
        # The new life counts no service that it was not told; the old one's counts died with it.
        gateway.service = ServiceLog()
        return gateway, True

    def adopt(self, heir: ChannelGateway, mono_s: float) -> list[LiveSequence]:
        """Gives `heir` the outcomes and sequences of silent gateways; returns the sequences."""
        taken: list[LiveSequence] = []
        for gateway in [gateway for gateway in self._gateways.values() if self.is_silent(gateway, mono_s)]:
            if gateway is heir:
                continue
            for sequence_id, news in gateway.outcomes.items():
                heir.keep(sequence_id, news)
            heir.lost_outcomes += gateway.lost_outcomes
            for sequence in gateway.live.values():
                heir.own(sequence)
                taken.append(sequence)
            del self._gateways[gateway.gateway_id]
        return taken

    def _make_room(self, mono_s: float) -> None:
        if len(self._gateways) < self._most:
            return
        for gateway in list(self._gateways.values()):
            if gateway.is_empty and self.is_silent(gateway, mono_s):
                del self._gateways[gateway.gateway_id]
                return
        raise GatewayRefused(
            "too_many_gateways", f"{self._most} gateways are known: the server takes no more"
        )
