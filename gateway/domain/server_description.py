"""The server that ran a request, and the terms of its key, as stored beside timelines. Pure.

For replaying recorded traffic with the settings of its time (`fairgate whatif`). JSON with a version number;
fields added later must have a default.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from engine.messages import Ready, StepTime
from gateway.config import AGEING_S, GatewayConfig
from tenants.pricing.pricing import PriceEntry
from tenants.types import Limit, Tier

VERSION = 1


class UnreadableDescription(ValueError):
    """Stored bytes of no known version; the message names the description."""


class DescribedEngine(msgspec.Struct, frozen=True):
    device: str
    context_tokens: int
    block_tokens: int
    num_blocks: int
    max_sequences: int
    max_batched_tokens: int

    @classmethod
    def of(cls, ready: Ready) -> DescribedEngine:
        return cls(
            ready.model.device,
            ready.model.context_tokens,
            ready.block_tokens,
            ready.num_blocks,
            ready.max_sequences,
            ready.max_batched_tokens,
        )

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.block_tokens


class DescribedQueue(msgspec.Struct, frozen=True):
    """The queue's settings; changes by a control loop are not included."""

    lookahead_sequences: int
    kv_window: float
    ageing_s: tuple[float, ...]
    """By rank of the tier; 0: requests of that tier do not age."""
    long_tokens: int
    """0: by the model's context."""
    long_share_sequences: float
    long_share_kv: float
    batch_share: float
    reservation_burst_s: float

    @classmethod
    def of(cls, config: GatewayConfig) -> DescribedQueue:
        return cls(
            config.lookahead_sequences,
            config.kv_window,
            tuple(0.0 if AGEING_S[tier] == float("inf") else AGEING_S[tier] for tier in Tier),
            config.long_tokens,
            config.long_share_sequences,
            config.long_share_kv,
            config.batch_share,
            config.reservation_burst_s,
        )


class ServerDescription(msgspec.Struct, frozen=True):
    """What served one model through one gateway."""

    gateway_id: str
    model: str
    is_foreign: bool
    """Some replica is another server, whose sizes and steps are unknown."""
    engines: tuple[DescribedEngine, ...]
    """Those that had announced themselves."""
    policy: str
    options: dict[str, str | int | float]
    """Only those that differ from the defaults."""
    queue: DescribedQueue
    step_time: StepTime | None = None
    """The mean of the last minutes; None: unknown."""
    version: int = VERSION


class RequestTerms(msgspec.Struct, frozen=True):
    """A key's rights when it sent a request."""

    weight: float
    reserved_cost_per_s: float = 0.0
    limits: tuple[Limit, ...] = ()
    """Those the request was held on."""
    price: PriceEntry | None = None
    """Of its model and tier, if limits need it."""
    reserved_tier: Tier | None = None
    """The tier of the reservation; None: all."""
    version: int = VERSION


Described = TypeVar("Described", ServerDescription, RequestTerms)


class _Versioned(msgspec.Struct, frozen=True):
    version: int = 0


def packed(described: ServerDescription | RequestTerms) -> bytes:
    return msgspec.json.encode(described)


def server_of(content: bytes) -> ServerDescription:
    return _unpacked(content, ServerDescription)


def terms_of(content: bytes) -> RequestTerms:
    return _unpacked(content, RequestTerms)


def _unpacked(content: bytes, kind: type[Described]) -> Described:
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise UnreadableDescription(
                f"it was recorded as version {version}, and this program reads version {VERSION}"
            )
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise UnreadableDescription(f"it is damaged: {error}") from None
