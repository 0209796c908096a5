"""Live state of all gateways: their requests, and what runs on each replica.

Missing answers are counted by the heartbeats in the database, never guessed.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gateway.metrics.waits import KeptWaits
from gateway.pools.live_counters import FleetNow, GatewayNow, merged
from gateway.pools.request_actions import (
    COUNT,
    COUNTERS,
    LIST,
    MAX_LISTED,
    WAITING,
    ActionResult,
    RequestAction,
    RequestActions,
    Unreachable,
)
from gateway.pools.waiting import MAX_WAITING_SHOWN, WaitingHere, WaitingNow
from tenants.directory.gateways import GatewayRegistry
from tenants.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from gateway.pools.peer_requests import PeerRequests


S = TypeVar("S", bound=msgspec.Struct)
PAGE_ANSWER_S = 1.0
"""Timeout for watched pages, which do not wait for a stalled gateway."""


@dataclass(frozen=True, slots=True)
class LiveRequests:
    """Oldest first, at most `MAX_LISTED`."""

    data: list[dict[str, Any]]
    has_more: bool
    gateways_missing: int
    """Other gateways that did not answer: theirs are not in the list."""


@dataclass(frozen=True, slots=True)
class WaitingRequests:
    """Oldest first, at most `MAX_WAITING_SHOWN`."""

    data: list[WaitingNow]
    total: int
    """Of the gateways that answered."""
    gateways: int
    gateways_missing: int
    kept: list[KeptWaits]
    """Told against had, the longest waits first; of a tenant's tier at several gateways that of the one which
    had the most of its last requests."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Use from one event loop."""

    gateway_id: str
    own: RequestActions
    peers: PeerRequests | None
    """None: there are no others, or they cannot be asked."""
    registry: GatewayRegistry
    stale_s: float
    """A gateway silent for longer is taken for dead."""

    async def live_requests(self, ask: RequestAction) -> LiveRequests:
        """Requests of all gateways that match a `list` action, each once."""
        assert ask.act == LIST
        answers, missing = await self._ask_all(ask)
        # The same id in two answers: it moved between them, and what is here goes first.
        by_id: dict[str, dict[str, Any]] = {}
        for answer in answers:
            for shown in answer.value:
                by_id.setdefault(shown["id"], shown)
        requests = sorted(by_id.values(), key=lambda shown: (-shown["elapsed_s"], shown["id"]))
        return LiveRequests(requests[:MAX_LISTED], len(requests) > MAX_LISTED, missing)

    async def in_flight(self) -> tuple[Mapping[tuple[str, str], int], int]:
        """Dispatched requests by model and replica name, and the number of missing answers."""
        answers, missing = await self._ask_all(RequestAction(COUNT))
        counts: Counter[tuple[str, str]] = Counter()
        for answer in answers:
            for pool, replica, number in answer.value:
                counts[pool, replica] += number
        return counts, missing

    async def now(self) -> FleetNow:
        answers, missing = await self._ask_all(RequestAction(COUNTERS), PAGE_ANSWER_S)
        counters = _read(answers, GatewayNow)
        return merged(counters, missing + len(answers) - len(counters))

    async def waiting(self, tenant_ids: Collection[str] | None, tier: str = "") -> WaitingRequests:
        """`tenant_ids`: None: of all tenants; `tier`: empty: all."""
        whose = None if tenant_ids is None else tuple(sorted(tenant_ids))
        ask = RequestAction(WAITING, of_tenants=whose, tier=tier)
        answers, missing = await self._ask_all(ask, PAGE_ANSWER_S)
        here = _read(answers, WaitingHere)
        by_id: dict[str, WaitingNow] = {}
        for answer in here:
            for row in answer.data:
                by_id.setdefault(row.request_id, row)
        oldest = sorted(by_id.values(), key=lambda row: (-row.elapsed_s, row.request_id))
        total = max(len(oldest), sum(answer.total for answer in here))
        unread = len(answers) - len(here)
        kept: dict[tuple[str, str], KeptWaits] = {}
        for line in sorted((line for answer in here for line in answer.kept), key=lambda line: line.requests):
            kept[line.tenant_id, line.tier] = line
        longest = sorted(kept.values(), key=lambda line: (-line.had_p50_s, line.tenant_id, line.tier))
        return WaitingRequests(oldest[:MAX_WAITING_SHOWN], total, len(here), missing + unread, longest)

    async def _ask_all(
        self, ask: RequestAction, within_s: float = math.inf
    ) -> tuple[list[ActionResult], int]:
        """The answers of all gateways, and how many others did not answer."""
        own = await self.own.act(ask)
        if self.peers is None:
            return [own], 0
        others = await self._others()
        try:
            heard = await self.peers.ask(ask, wants_all=True, within_s=within_s)
        except Unreachable:
            return [own], 1 if others is None else others
        # One of an older version does not know every question.
        understood = [answer for answer in heard.answers if answer.is_found]
        silent = heard.missing + len(heard.answers) - len(understood)
        return [own, *understood], max(silent, (others or 0) - len(understood))

    async def _others(self) -> int | None:
        """Other live gateways by their heartbeats; None: the database is unavailable."""
        try:
            seen = await self.registry.seen()
        except DatabaseUnavailable:
            return None
        return sum(row.gateway_id != self.gateway_id and row.silent_s <= self.stale_s for row in seen)


def _read(answers: Iterable[ActionResult], kind: type[S]) -> list[S]:
    """The answers in this version's form."""
    read: list[S] = []
    for answer in answers:
        with contextlib.suppress(msgspec.ValidationError):
            read.append(msgspec.convert(answer.value, kind))
    return read
