"""Encodes messages to a shared pool and decodes its answers: MessagePack, as `lua/9_exchange.lua`. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.entry import OUTPUT_TOKEN_COST
from gateway.flow.knobs import QueueSettings
from gateway.flow.window import Replica
from tenants.quota import scripts

FALL = 2**51
"""Subtracted from all counters when one comes near 2^53; an answer has the number of falls."""
NUM_KEYS = 16
MAX_TENANTS = 10_000
_NAMES = ("meta", "tenants", "tickets", "lines", "due", "ages", "loads", "gateways", "owned", "outbox")
_PLACES = 6

ORDERS = ("fcfs", "vtc", "hybrid")
"""The orders that gateways can share."""


def script() -> str:
    parts = sorted((Path(__file__).parent / "lua").glob("*.lua"))
    return "\n".join([scripts.server(), *(part.read_text(encoding="utf-8") for part in parts)])


def look_script() -> str:
    return (Path(__file__).parent / "look.lua").read_text(encoding="utf-8")


def look_keys(prefix: str, pool: str) -> list[str]:
    every = keys(prefix, pool)
    return [every[_NAMES.index("tenants")], every[_NAMES.index("meta")], *every[len(_NAMES) :]]


def keys(prefix: str, pool: str) -> list[str]:
    """A pool's keys, all in one slot of a Redis Cluster."""
    base = f"{prefix}:flow:{{{pool}}}"
    places = [f"standing{place}" for place in range(1, _PLACES + 1)]
    return [f"{base}:{name}" for name in (*_NAMES, *places)]


def load_key(prefix: str, pool: str) -> str:
    return f"{prefix}:flow:{{{pool}}}:load"


def channel(prefix: str, pool: str, gateway_id: str) -> str:
    return f"{keys(prefix, pool)[0]}:{gateway_id}"


@dataclass(frozen=True, slots=True)
class PoolRule:
    """Settings common to all gateways of a pool; the last one to join sets them."""

    max_queued: int
    max_queued_per_tenant: int
    kv_window: float
    ageing_s: tuple[float, ...]
    """By tier; 0: never."""
    share_kv: float
    """Of the long lane, where its knob rests."""
    reservation_burst_s: float
    knobs: dict[str, float]
    """Where they rest."""
    stale_us: int
    """A gateway silent for longer is taken for dead."""
    hold_us: int = 1_000_000
    """After Redis lost everything nothing is dispatched for this time: gateways send what they have."""
    output_cost: int = OUTPUT_TOKEN_COST
    max_tenants: int = MAX_TENANTS

    @classmethod
    def of(cls, settings: QueueSettings, stale_us: int) -> PoolRule:
        return cls(
            settings.max_queued,
            settings.max_queued_per_tenant,
            settings.window.kv_window,
            tuple(0.0 if math.isinf(seconds) else seconds for seconds in settings.ageing_s),
            settings.lanes.share_kv,
            settings.reservation_burst_s,
            {knob.value: rest for knob, rest in settings.rests.positions.items()},
            stale_us,
        )


@dataclass(frozen=True, slots=True)
class Joining:
    rule: PoolRule
    order: str
    brakes: list[float]
    returns: bool


class GivenTurn(msgspec.Struct, frozen=True, array_like=True):
    """A request goes to a replica. `number` counts the pool's turns."""

    entry_id: str
    life: int
    """Of the gateway, when it queued the request."""
    replica_id: str
    rank: int
    """At the engine."""
    by_reservation: bool
    number: int
    falls: int
    counter: int
    place_counter: int
    """The tenant's, as the engine should know it; both after the charge and without what they fell by."""
    is_owed: bool = False
    had: int = 0
    """`place_counter` less what all gateways charged the tenant ahead, as of their last words."""
    heard: int = 0
    """The last serial number of its service at that engine that a gateway reported; see `Dispatch`."""
    engine_life: str = ""


class QueueRefusal(msgspec.Struct, frozen=True, array_like=True):
    entry_id: str
    of_tenant: bool
    limit: int
    retry_after_s: float


class PoolReply(msgspec.Struct, frozen=True, array_like=True):
    status: str
    """`ok`, or `lost`: the pool does not know this gateway; nothing was done."""
    epoch: str
    now_us: int
    turns: list[GivenTurn]
    refused: list[QueueRefusal]
    counters: list[tuple[str, int]]
    queued: list[int]
    """Waiting requests of all gateways: tier by tier, ordinary and long."""
    falls: int
    order: str
    held_us: int
    """Nothing is dispatched for this time: gateways rejoin after Redis has lost everything."""


class TenantWaiting(msgspec.Struct, frozen=True, array_like=True):
    place: int
    """Tier by tier, ordinary and long, from 1."""
    tenant_id: str
    weight: float
    counter: int
    """By which the place ranks it, without what all fell by."""
    count: int
    input_tokens: int
    output_tokens: int

    @property
    def tier(self) -> int:
        return (self.place - 1) // 2

    @property
    def lane(self) -> int:
        return (self.place - 1) % 2


class Look(msgspec.Struct, frozen=True, array_like=True):
    """What waits in a pool: of each place the tenants that are next."""

    falls: int
    waits: list[TenantWaiting]


_answers = msgspec.msgpack.Decoder(PoolReply)
_looks = msgspec.msgpack.Decoder(Look)
_turns = msgspec.msgpack.Decoder(list[GivenTurn])


def answer(packed: bytes) -> PoolReply:
    """Raises `msgspec.DecodeError`."""
    return _answers.decode(packed)


def turns(packed: bytes) -> list[GivenTurn]:
    """Raises `msgspec.DecodeError`."""
    return _turns.decode(packed)


def look(packed: bytes) -> Look:
    """Raises `msgspec.DecodeError`."""
    return _looks.decode(packed)


def message(
    replicas: Sequence[Replica],
    confirmed: Sequence[str],
    acts: Sequence[list[Any]],
    passage: Joining | str | None,
) -> bytes:
    """One message; `passage` is what one that joins brings, or `leaves`."""
    sizes = [
        {
            "id": replica.replica_id,
            "max_sequences": replica.max_sequences,
            "kv_tokens": replica.kv_tokens,
            "pauses": replica.pauses,
        }
        for replica in replicas
    ]
    words: list[Any] = [sizes, list(confirmed), list(acts)]
    if passage:
        words.append(asdict(passage) if isinstance(passage, Joining) else passage)
    return msgspec.msgpack.encode(words)
