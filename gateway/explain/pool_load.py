"""Shares the load of a pool between the gateways that share its queue: what to tell, and what was heard.

Each tells the others a few times a second which requests lined up, were dispatched and ended, with their
sizes, and how much service its own had. So every gateway judges missed targets and divides service by the
load of the whole pool. Instants are told as ages: clocks may disagree. A batch is repeated under its number
until it is known to have arrived. Pure: it is bytes, which `gateway/dispatch/load_feed.py` carries.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from gateway.explain.fluid_share import Job
from gateway.explain.ideal_share import FairTerms
from gateway.explain.load_log import LoadLog
from gateway.explain.minutes.flow_meter import FlowMeter

MAX_TOLD = 2_000
"""Per batch; further ones are left out and counted."""
MAX_ENDS = 20_000
"""Ends waiting to be reported; beyond it nothing reported so far is valid any more."""
SILENT_S = 10.0
"""A gateway with requests reports every half second; after this silence its requests are over."""
KNOWN_AFTER_S = 1.5
"""Older events have arrived from all gateways, unless one is late."""


class ToldArrival(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    tenant_id: str
    tier: int
    weight: float
    age_s: float
    input_tokens: int
    output_tokens: int
    sequences: int
    reserved_per_s: float = 0.0
    reserved_tier: int | None = None


class ToldTurn(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    tier: int
    age_s: float


class ToldEnd(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    age_s: float
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    is_complete: bool
    cost: int


class ToldService(msgspec.Struct, frozen=True, array_like=True):
    since_age_s: float
    until_age_s: float
    total: int


class LoadBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway reports at one time, in order."""

    gateway_id: str
    life: str
    number: int
    arrivals: list[ToldArrival]
    turns: list[ToldTurn]
    ends: list[ToldEnd]
    service: list[ToldService]


_batches = msgspec.msgpack.Decoder(LoadBatch)


@dataclass(slots=True)
class _Heard:
    life: str
    number: int
    at_s: float


class PoolLoadShare:
    """One gateway's part in one pool. Use from one event loop."""

    def __init__(self, gateway_id: str, life: str, log: LoadLog, meter: FlowMeter) -> None:
        self.left_out = 0
        self._gateway_id = gateway_id
        self._life = life
        self._number = 0
        self._out: LoadBatch | None = None
        """Sent and not confirmed; with instants instead of ages."""
        self._log = log
        self._meter = meter
        self._own_open: set[str] = set()
        self._arrivals: list[ToldArrival] = []
        self._turns: list[ToldTurn] = []
        self._ends: list[ToldEnd] = []
        self._service: list[ToldService] = []
        self._heard: dict[str, _Heard] = {}
        self._open: dict[str, str] = {}
        """Other gateways' requests that have not ended -> the gateway."""
        meter.on_served = self.served

    # ------------------------------------------------------------ what happens here

    def arrived(self, entry: QueueEntry, sequences: int, terms: FairTerms) -> None:
        self._own_open.add(entry.entry_id)
        if self._has_room():
            self._arrivals.append(
                ToldArrival(
                    entry.entry_id,
                    entry.tenant_id,
                    entry.tier,
                    entry.weight,
                    entry.arrived_s,
                    entry.input_tokens,
                    entry.predicted_output_tokens,
                    sequences,
                    terms.reserved_per_s,
                    terms.reserved_tier,
                )
            )

    def dispatched(self, request_id: str, tier: int, now_s: float) -> None:
        if self._has_room():
            self._turns.append(ToldTurn(request_id, tier, now_s))

    def ended(self, job: Job, now_s: float, cost: int, *, is_complete: bool) -> None:
        self._own_open.discard(job.job_id)
        # Never left out: the others would take it for one that runs.
        self._ends.append(
            ToldEnd(
                job.job_id, now_s, job.input_tokens, job.cached_tokens, job.output_tokens, is_complete, cost
            )
        )

    def served(self, since_s: float, until_s: float, total: int) -> None:
        if self._has_room():
            self._service.append(ToldService(since_s, until_s, total))

    def _has_room(self) -> bool:
        has_room = len(self._arrivals) + len(self._turns) + len(self._service) < MAX_TOLD
        self.left_out += not has_room
        return has_room

    def tell(self, now_s: float) -> bytes | None:
        """The unconfirmed batch, or the next; None: there is nothing to report."""
        if len(self._ends) > MAX_ENDS:
            self._life += "+"
            self._out, self._number = None, 0
            self._arrivals, self._turns, self._ends, self._service = [], [], [], []
        if self._out is None:
            if not (self._own_open or self._arrivals or self._turns or self._ends or self._service):
                return None
            self._number += 1
            self._out = LoadBatch(
                self._gateway_id,
                self._life,
                self._number,
                self._arrivals,
                self._turns,
                self._ends,
                self._service,
            )
            self._arrivals, self._turns, self._ends, self._service = [], [], [], []
        out = self._out
        return msgspec.msgpack.encode(
            replace(
                out,
                arrivals=[replace(arrival, age_s=now_s - arrival.age_s) for arrival in out.arrivals],
                turns=[replace(turn, age_s=now_s - turn.age_s) for turn in out.turns],
                ends=[replace(end, age_s=now_s - end.age_s) for end in out.ends],
                service=[
                    ToldService(now_s - service.since_age_s, now_s - service.until_age_s, service.total)
                    for service in out.service
                ],
            )
        )

    def told(self) -> None:
        self._out = None

    # ------------------------------------------------------------ what others tell

    def hear(self, packed: bytes, told_s: float) -> None:
        batch = _batches.decode(packed)
        if batch.gateway_id == self._gateway_id:
            return
        known = self._heard.get(batch.gateway_id)
        if known is not None and known.life != batch.life:
            self._lost(batch.gateway_id, known.at_s)
        elif known is not None and known.number >= batch.number:
            return  # told twice, as its answer was lost
        self._heard[batch.gateway_id] = _Heard(batch.life, batch.number, told_s)
        for arrival in batch.arrivals:
            self._arrived(batch.gateway_id, arrival, told_s - arrival.age_s)
        for turn in batch.turns:
            self._log.dispatched(turn.request_id, turn.tier, told_s - turn.age_s)
        for end in batch.ends:
            self._ended(end, told_s - end.age_s)
        for service in batch.service:
            self._meter.served_elsewhere(
                told_s - service.since_age_s, told_s - service.until_age_s, service.total
            )

    def forget_silent(self, now_s: float) -> None:
        for gateway_id, heard in list(self._heard.items()):
            if now_s - heard.at_s > SILENT_S:
                self._lost(gateway_id, heard.at_s)
                del self._heard[gateway_id]

    def known_until_s(self, now_s: float) -> float:
        """Until when all load is known: a busy gateway with requests is waited for until it is silent."""
        told_s = [self._heard[gateway_id].at_s for gateway_id in set(self._open.values())]
        return min([now_s - KNOWN_AFTER_S, *told_s])

    def open_elsewhere(self) -> Counter[str]:
        return Counter(self._open.values())

    def _arrived(self, gateway_id: str, told: ToldArrival, at_s: float) -> None:
        self._open[told.request_id] = gateway_id
        self._log.arrived(
            told.request_id,
            told.tenant_id,
            told.tier,
            told.weight,
            at_s,
            told.input_tokens,
            told.output_tokens,
            told.sequences,
            is_elsewhere=True,
        )
        cost = told.input_tokens * INPUT_TOKEN_COST + told.output_tokens * OUTPUT_TOKEN_COST
        terms = FairTerms(told.weight, told.reserved_per_s, told.reserved_tier)
        self._meter.lined_up(told.request_id, told.tenant_id, told.tier, cost, terms, at_s, None)

    def _ended(self, told: ToldEnd, at_s: float) -> None:
        self._open.pop(told.request_id, None)
        self._log.ended(
            told.request_id,
            at_s,
            told.computed_tokens,
            told.cached_tokens,
            told.output_tokens,
            is_complete=told.is_complete,
        )
        self._meter.ended(told.request_id, at_s, told.cost)

    def _lost(self, gateway_id: str, at_s: float) -> None:
        for request_id in [open_id for open_id, owner in self._open.items() if owner == gateway_id]:
            self._ended(ToldEnd(request_id, 0.0, 0, 0, 0, False, 0), at_s)
