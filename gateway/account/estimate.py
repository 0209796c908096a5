"""What was promised, and what came of it? The estimate made on arrival and the account beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import Decision
from gateway.account.promise import Promise
from tenants.types import Amounts, Tier

if TYPE_CHECKING:
    from gateway.account.redemption import Redemption

TOOK_A_PLACE = frozenset({"admit", "resume"})
LOST_ITS_PLACE = frozenset({"pause", "suspend"})
"""Kinds of `Decision`."""

Seconds = tuple[float, float]
"""p50, p90."""
Whole = tuple[int, int]
"""p50, p90."""


_AS_JSON = (
    b'{"wait_s":{"p50":%.4f,"p90":%.4f},"ttft_s":{"p50":%.4f,"p90":%.4f},"tpot_s":{"p50":%.5f,"p90":%.5f},'
    b'"e2e_s":{"p50":%.4f,"p90":%.4f},"output_tokens":{"p50":%d,"p90":%d},'
    b'"cost_nanousd":{"p50":%d,"p90":%d,"max":%d},'
    b'"tokens_ahead":{"own":%d,"others":%d,"higher_tier":%d},"basis":%s,"samples":%d,"saturated":%s}'
)
_encode_basis = lru_cache(maxsize=64)(msgspec.json.Encoder().encode)
"""There are only a few."""


class Estimate(msgspec.Struct, frozen=True, gc=False):
    """A forecast for one request in one tier, with its price."""

    wait_s: Seconds
    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds
    output_tokens: Whole
    cost_nanousd: Whole
    max_cost_nanousd: int
    """Of the longest answer that may come: never exceeded."""
    tokens_ahead: dict[str, int]
    """Cost tokens that go first, by cause."""
    basis: str
    samples: int
    saturated: bool
    promise: Promise | None = None
    """What it is held against once the request is over."""

    def as_json(self) -> dict[str, Any]:
        """As the API shows it."""
        wait_s, ttft_s, tpot_s, e2e_s = self.wait_s, self.ttft_s, self.tpot_s, self.e2e_s
        tokens, cost = self.output_tokens, self.cost_nanousd
        return {
            "wait_s": {"p50": round(wait_s[0], 4), "p90": round(wait_s[1], 4)},
            "ttft_s": {"p50": round(ttft_s[0], 4), "p90": round(ttft_s[1], 4)},
            "tpot_s": {"p50": round(tpot_s[0], 5), "p90": round(tpot_s[1], 5)},
            "e2e_s": {"p50": round(e2e_s[0], 4), "p90": round(e2e_s[1], 4)},
            "output_tokens": {"p50": tokens[0], "p90": tokens[1]},
            "cost_nanousd": {"p50": cost[0], "p90": cost[1], "max": self.max_cost_nanousd},
            "tokens_ahead": self.tokens_ahead,
            "basis": self.basis,
            "samples": self.samples,
            "saturated": self.saturated,
        }

    def encoded(self) -> msgspec.Raw:
        """`as_json` as every answer has it: written in one go, for half of what dictionaries cost."""
        (wait_p50_s, wait_p90_s), (ttft_p50_s, ttft_p90_s) = self.wait_s, self.ttft_s
        (tpot_p50_s, tpot_p90_s), (e2e_p50_s, e2e_p90_s) = self.tpot_s, self.e2e_s
        (tokens_p50, tokens_p90), (cost_p50, cost_p90) = self.output_tokens, self.cost_nanousd
        ahead = self.tokens_ahead
        return msgspec.Raw(
            _AS_JSON
            % (
                wait_p50_s, wait_p90_s, ttft_p50_s, ttft_p90_s, tpot_p50_s, tpot_p90_s, e2e_p50_s, e2e_p90_s,
                tokens_p50, tokens_p90, cost_p50, cost_p90, self.max_cost_nanousd,
                ahead.get("own", 0), ahead.get("others", 0), ahead.get("higher_tier", 0),
                _encode_basis(self.basis), self.samples, b"true" if self.saturated else b"false",
            )
        )  # fmt: skip


@dataclass(slots=True)
class Times:
    """When what happened to one request, on the gateway's clock. None: it did not come to that."""

    arrived_s: float
    dispatched_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None

    @property
    def wait_s(self) -> float | None:
        """Arrival to dispatch."""
        return None if self.dispatched_s is None else self.dispatched_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float | None:
        """Arrival to the end."""
        return None if self.ended_s is None else self.ended_s - self.arrived_s

    def tpot_s(self, output_tokens: int) -> float | None:
        """Time per output token after the first, as seen here."""
        if self.first_token_s is None or self.last_token_s is None or output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (output_tokens - 1)


@dataclass(frozen=True, slots=True)
class TierMove:
    """A waiting request changed its tier."""

    before: Tier
    after: Tier
    after_s: float
    """Since its arrival."""
    by: str
    """`tenant` or `operator`."""


class Account(msgspec.Struct, frozen=True):
    """The last word on a request: what it was promised, what it got, what it paid."""

    request_id: str
    tenant: str
    tier: str
    outcome: str
    stop_cause: str | None
    estimate: Estimate | None
    times: Times
    held: Amounts
    charged: Amounts
    cached_tokens: int
    preemptions: int
    top_ups: int = 0
    """How often more was held while it decoded."""
    upstream: str | None = None
    """The replica that ran it; None: it came to none."""
    basis: str = "engine"
    """Who counted its tokens, see `gateway.upstream.base.CountedOutcome`; `engine`: our own."""
    decisions: Sequence[Decision] = ()
    """What the engines' schedulers decided about it."""
    moves: Sequence[TierMove] = ()
    """Between tiers, while it waited."""
    redemption: Redemption | None = None
    """What came of the quote that it was held to; None: there was none."""

    def as_json(self) -> dict[str, Any]:
        """The `fairgate` object of the answer, to be encoded."""
        charged, held = self.charged, self.held
        shown: dict[str, Any] = {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "tier": self.tier,
            "outcome": self.outcome,
            "estimate": self.estimate.encoded() if self.estimate is not None else None,
            "actual": {
                "wait_s": _rounded(self.times.wait_s),
                "ttft_s": _rounded(self.times.ttft_s),
                "tpot_s": _rounded(self.times.tpot_s(charged.output_tokens)),
                "e2e_s": _rounded(self.times.e2e_s),
                "input_tokens": charged.input_tokens,
                "output_tokens": charged.output_tokens,
                "cost_nanousd": charged.cost_nanousd,
                "preemptions": self.preemptions,
            },
            "scheduling": [
                {
                    "kind": each.kind,
                    "after_s": _rounded(each.at_s),
                    "rule": each.rule,
                    "rank": each.rank,
                    # Not who they are: they may be another tenant's.
                    "others": len(each.others),
                    "displaced_tokens": each.displaced_tokens,
                }
                for each in self.decisions
            ],
            "displaced": _displaced(self.decisions),
            "moves": [
                {
                    "from": each.before.value,
                    "to": each.after.value,
                    "after_s": _rounded(each.after_s),
                    "by": each.by,
                }
                for each in self.moves
            ],
            "tokens": _account(
                held.input_tokens + held.output_tokens, charged.input_tokens + charged.output_tokens
            ),
            "cost_nanousd": _account(held.cost_nanousd, charged.cost_nanousd),
            "top_ups": self.top_ups,
            "upstream": self.upstream,
            "basis": self.basis,
        }
        if self.redemption is not None:
            shown["quote"] = self.redemption.as_json()
        if self.stop_cause is not None:
            shown["stop_cause"] = self.stop_cause
        return shown


def _displaced(decisions: Sequence[Decision]) -> dict[str, int]:
    """What soft preemption did: `by_this` counts the tokens that others stood back for it (and how many times
    it took a place), `of_this` the tokens that it stood back for others (and how often it lost its place).

    Who they are is not told, for they may be another tenant's; `scheduling` has the rule of each case."""
    took = [each for each in decisions if each.kind in TOOK_A_PLACE and each.others]
    lost = [each for each in decisions if each.kind in LOST_ITS_PLACE]
    return {
        "places_taken": sum(len(each.others) for each in took),
        "tokens_by_this": sum(each.displaced_tokens for each in took),
        "places_lost": len(lost),
        "tokens_of_this": sum(each.displaced_tokens for each in lost),
    }


def _account(held: int, charged: int) -> dict[str, int]:
    return {"held": held, "charged": charged, "refunded": held - charged}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
