"""Gateway sessions of an engine, and the owner of each live sequence. Pure.

Every connection of a gateway is a session, named by its socket's identity. It ends when it is silent for too
long, its socket is gone, its queue stays full or the gateway opens a new one; its sequences are then
cancelled. A session reaches only its own sequences and outcomes.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import GATEWAY_LOST_S, HEARTBEAT_S, PROTOCOL_VERSION, Hello, TenantShare

if TYPE_CHECKING:
    from engine.core.step_service import ServiceShare

MAX_GATEWAYS = 64
MAX_GATEWAY_ID_CHARACTERS = 128
REMEMBERED_SUPERSEDED = 256
SECOND_LOOK_S = 2 * HEARTBEAT_S
"""A session that seems lost is looked at again after this: the engine itself may have stood still."""


@dataclass(slots=True, eq=False)
class GatewaySession:
    identity: bytes
    gateway_id: str
    heard_s: float
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Known to the engine and this gateway: names the session in `Alive`."""
    seems_lost_s: float | None = None
    """Since when it seems lost; None: it does not."""
    tenants: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opened:
    """A new session; `superseded` is the same gateway's older one, ended by it."""

    session: GatewaySession
    superseded: GatewaySession | None


@dataclass(frozen=True, slots=True)
class HelloRefused:
    """A session was not opened. `code` is stable, `message` is for people."""

    code: str
    message: str


class GatewaySessions:
    """Live sessions, and the owner of each live sequence. One writer: the engine's loop."""

    def __init__(
        self, *, now_s: float, lost_s: float = GATEWAY_LOST_S, max_gateways: int = MAX_GATEWAYS
    ) -> None:
        self._lost_s = lost_s
        self._max_gateways = max_gateways
        self._sessions: dict[bytes, GatewaySession] = {}
        self._by_secret: dict[str, GatewaySession] = {}
        self._owners: dict[str, GatewaySession] = {}
        self._superseded: OrderedDict[bytes, None] = OrderedDict()
        self._heard_s = now_s

    @property
    def sessions(self) -> list[GatewaySession]:
        return list(self._sessions.values())

    @property
    def live_gateway_ids(self) -> set[str]:
        return {session.gateway_id for session in self._sessions.values()}

    @property
    def live_sequences(self) -> int:
        return len(self._owners)

    def unheard_s(self, now_s: float) -> float:
        return now_s - self._heard_s

    def find(self, identity: bytes) -> GatewaySession | None:
        return self._sessions.get(identity)

    def hear(self, identity: bytes, now_s: float) -> GatewaySession | None:
        """Notes a message from a session; None when there is no such session."""
        session = self._sessions.get(identity)
        if session is not None:
            self._note(session, now_s)
        return session

    def alive(self, secret: str, now_s: float) -> None:
        """Notes a message of a gateway's liveness thread; without effect for an ended or unknown session."""
        session = self._by_secret.get(secret)
        if session is not None:
            self._note(session, now_s)

    def _note(self, session: GatewaySession, now_s: float) -> None:
        session.heard_s = self._heard_s = now_s
        session.seems_lost_s = None

    def hello(self, identity: bytes, hello: Hello, now_s: float) -> Opened | HelloRefused | None:
        """Opens a session, or refuses it; None when it lives already (a heartbeat)."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return HelloRefused(
                "protocol_version",
                f"this engine speaks protocol version {PROTOCOL_VERSION}, the gateway "
                f"{hello.protocol_version}: run the same release on both sides",
            )
        if not 0 < len(hello.gateway_id) <= MAX_GATEWAY_ID_CHARACTERS:
            return HelloRefused(
                "bad_hello",
                f"gateway_id must have 1 to {MAX_GATEWAY_ID_CHARACTERS} characters, "
                f"not {len(hello.gateway_id)}",
            )
        known = self.hear(identity, now_s)
        if known is not None:
            if known.gateway_id == hello.gateway_id:
                return None
            return HelloRefused("bad_hello", "a session keeps its gateway_id: open a new connection")
        superseded = next((s for s in self._sessions.values() if s.gateway_id == hello.gateway_id), None)
        if superseded is not None and identity in self._superseded:
            return HelloRefused(
                "superseded",
                f"another process has connected as gateway {hello.gateway_id!r}: "
                "give each gateway process an id of its own",
            )
        if superseded is None and len(self._sessions) >= self._max_gateways:
            return HelloRefused(
                "too_many_gateways", f"{self._max_gateways} gateways are connected: the engine takes no more"
            )
        if superseded is not None:
            self.end(superseded)
            self._superseded[superseded.identity] = None
            if len(self._superseded) > REMEMBERED_SUPERSEDED:
                self._superseded.popitem(last=False)
        self._superseded.pop(identity, None)
        session = GatewaySession(identity, hello.gateway_id, now_s)
        self._sessions[identity] = self._by_secret[session.secret] = session
        self._heard_s = now_s
        return Opened(session, superseded)

    def silent(self, now_s: float) -> list[GatewaySession]:
        """Sessions unheard for `lost_s`, also at a second look: their gateways are lost."""
        lost = []
        for session in self._sessions.values():
            if now_s - session.heard_s < self._lost_s:
                continue
            if session.seems_lost_s is None:
                session.seems_lost_s = now_s
            elif now_s - session.seems_lost_s >= SECOND_LOOK_S:
                lost.append(session)
        return lost

    def end(self, session: GatewaySession) -> None:
        """Ends a session; its sequences stay owned by it until they have an outcome."""
        self._sessions.pop(session.identity, None)
        self._by_secret.pop(session.secret, None)

    def lives(self, session: GatewaySession) -> bool:
        return self._sessions.get(session.identity) is session

    def own(self, session: GatewaySession, sequence_id: str, tenant_id: str) -> None:
        session.tenants[sequence_id] = tenant_id
        self._owners[sequence_id] = session

    def owner(self, sequence_id: str) -> GatewaySession | None:
        return self._owners.get(sequence_id)

    def release(self, sequence_id: str) -> GatewaySession | None:
        session = self._owners.pop(sequence_id, None)
        if session is not None:
            session.tenants.pop(sequence_id, None)
        return session

    def share_service(self, service: Mapping[str, ServiceShare]) -> dict[bytes, dict[str, TenantShare]]:
        """Divides service by session identity: own tokens, their tenants' serials, a lift to one session."""
        shares: dict[bytes, dict[str, TenantShare]] = {}
        lifted: set[str] = set()
        for session in self._sessions.values():
            for tenant_id in service.keys() & set(session.tenants.values()):
                share = service[tenant_id]
                had = share.by_gateway.get(session.gateway_id)
                shares.setdefault(session.identity, {})[tenant_id] = TenantShare(
                    0 if had is None else had.computed_tokens,
                    0 if had is None else had.emitted_tokens,
                    share.serials,
                    {} if tenant_id in lifted else share.lifts,
                )
                lifted.add(tenant_id)
        return shares

    def unread(self) -> bool:
        """Whether a sequence of an ended session has no outcome yet."""
        return any(not self.lives(session) for session in set(self._owners.values()))
