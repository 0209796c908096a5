"""Requests of a simulation and their sources, which give the same ones each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from tenants.pricing.pricing import PriceEntry
from tenants.types import Limit

PREFIX_BLOCK_TOKENS = 512
"""Tokens of one id of `SimulatedRequest.prefix_blocks`."""
STANDARD = 1
MOST_REQUESTS = 5_000_000
MOST_TOKENS = 4_194_304


@dataclass(frozen=True, slots=True)
class RequestLimits:
    limits: tuple[Limit, ...]
    price: PriceEntry
    """Of its model and tier: the cost of tokens, and their weights."""
    may_be_cut: bool
    """It is admitted where there is no room for its longest answer."""
    cached_tokens: int = 0
    """Prompt tokens that were found in a cache, beside those of the request."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One arrival, with the length that its answer will have."""

    arrival_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `PREFIX_BLOCK_TOKENS` tokens, in order; the last may be partial. Two
    prompts of one tenant share as much as their leading ids agree. Empty: the prompt begins like no other."""
    tier: int = STANDARD
    weight: float = 1.0
    reserved_cost_per_s: float = 0.0
    reserved_tier: int | None = None
    """The rank of the tier that this is for; None: all."""
    prompt: tuple[int, ...] = ()
    """Token ids, for replicas with another block size; empty: made from `prefix_blocks`."""
    kind: str = "all"
    """Class in a report (`short`, `long`)."""
    e2e_target_s: float | None = None
    """Target of its tenant and tier for the whole answer; None: there is none."""
    limits: RequestLimits | None = None
    max_tokens: int = 0
    """The longest answer that its client allowed; 0: not known."""
    prefix_hashes: tuple[int, ...] = ()
    """Of the prompt, for the gateway's choice of a replica."""

    @property
    def cost(self) -> int:
        return self.input_tokens * INPUT_TOKEN_COST + self.output_tokens * OUTPUT_TOKEN_COST


class Source(Protocol):
    """Requests in order of arrival, the same ones each time."""

    @property
    def name(self) -> str: ...

    @property
    def has_prefixes(self) -> bool: ...

    def __iter__(self) -> Iterator[SimulatedRequest]:
        """From the first. Raises `BadTrace` where the source cannot be read on."""
        ...


class BadTrace(ValueError):
    """A source holds an invalid request; the message names file, line and column, and the remedy."""

    def __init__(self, why: str, remedy: str = "") -> None:
        """`remedy`: for a command line, whose flags it may name."""
        super().__init__(why + remedy)
        self.why = why


@dataclass(frozen=True, slots=True)
class Sped:
    """`speed` times as fast, cut off after `limit` requests. Raises ValueError."""

    source: Source
    speed: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"speed must be above 0, not {self.speed:g}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}")

    @property
    def name(self) -> str:
        changed = [f"x{self.speed:g}"] if self.speed != 1 else []
        changed += [f"first {self.limit:,}"] if self.limit is not None else []
        return self.source.name + (f" ({', '.join(changed)})" if changed else "")

    @property
    def has_prefixes(self) -> bool:
        return self.source.has_prefixes

    def __iter__(self) -> Iterator[SimulatedRequest]:
        for number, request in enumerate(self.source):
            if number == self.limit:
                return
            yield replace(request, arrival_s=request.arrival_s / self.speed) if self.speed != 1 else request
