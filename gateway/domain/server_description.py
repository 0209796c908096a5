"""Description of the server that ran a request, and the terms of the key that sent it.

Stored beside timelines, so that recorded traffic can be replayed by what was in force then, whatever the
settings say now (`fairgate whatif`). Both are JSON with a version number; what a later version adds must have
a default. Pure.
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
    """Stored bytes that are no description of this version; the message says of which they are."""


class DescribedEngine(msgspec.Struct, frozen=True):
    """Sizes of one replica, as it announced them."""

    device: str
    context_tokens: int
    block_tokens: int
    num_blocks: int
    max_sequences: int
    max_batched_tokens: int

    @classmethod
    def of(cls, ready: Ready) -> DescribedEngine:
        """From what an engine says first."""
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
        """What its KV cache holds."""
        return self.num_blocks * self.block_tokens


class DescribedQueue(msgspec.Struct, frozen=True):
    """Settings of the queue in front of the engines. What a control loop moves since is not in it."""

    lookahead_sequences: int
    kv_window: float
    ageing_s: tuple[float, ...]
    """By rank of the tier; 0: requests of that tier do not age."""
    long_tokens: int
    """0: by the context of the model."""
    long_share_sequences: float
    long_share_kv: float
    batch_share: float
    reservation_burst_s: float

    @classmethod
    def of(cls, config: GatewayConfig) -> DescribedQueue:
        """As a gateway is set up."""
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
    """The served model: its queue's name."""
    is_foreign: bool
    """Some replica is another server, whose sizes and steps are not known."""
    engines: tuple[DescribedEngine, ...]
    """The replicas that had announced themselves."""
    policy: str
    options: dict[str, str | int | float]
    """Of the policy, as far as they are not the defaults."""
    queue: DescribedQueue
    step_time: StepTime | None = None
    """The mean of the last minutes; None: not known."""
    version: int = VERSION


class RequestTerms(msgspec.Struct, frozen=True):
    """What a key was entitled to when it sent a request."""

    weight: float
    reserved_cost_per_s: float = 0.0
    limits: tuple[Limit, ...] = ()
    """Those in force that the request was held on."""
    price: PriceEntry | None = None
    """Of its model and tier, where limits need it to count tokens and money."""
    reserved_tier: Tier | None = None
    """The tier that the reservation is for; None: all."""
    version: int = VERSION


Described = TypeVar("Described", ServerDescription, RequestTerms)


class _Versioned(msgspec.Struct, frozen=True):
    version: int = 0


def packed(described: ServerDescription | RequestTerms) -> bytes:
    """As it is stored."""
    return msgspec.json.encode(described)


def server_of(content: bytes) -> ServerDescription:
    """The inverse of `packed`. Raises `UnreadableDescription`."""
    return _unpacked(content, ServerDescription)


def terms_of(content: bytes) -> RequestTerms:
    """The inverse of `packed`. Raises `UnreadableDescription`."""
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
