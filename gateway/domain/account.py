"""The account of a request: its estimate, its times, its charge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import Decision, DecodeShare
from gateway.domain.estimate import Estimate, Times
from tenants.types import Amounts, SubjectKind, Tier

if TYPE_CHECKING:
    from gateway.domain.fallback import Fallback
    from gateway.domain.quote_redemption import Redemption
    from tenants.quota.store import LimitState

TOOK_A_PLACE = frozenset({"admit", "resume"})
LOST_ITS_PLACE = frozenset({"pause", "suspend"})
"""Kinds of `Decision`."""


@dataclass(frozen=True, slots=True)
class TierMove:
    """A waiting request changed its tier."""

    before: Tier
    after: Tier
    after_s: float
    """Since its arrival."""
    by: str
    """`tenant` or `operator`."""


class Refill(msgspec.Struct, frozen=True):
    """A rate with a ceiling that the request was held on, as it was admitted."""

    meter: str
    rate_per_s: float
    ceiling_per_s: float
    refill_per_s: float
    """By the capacity that was spare then."""


def refills_of(states: Iterable[LimitState]) -> tuple[Refill, ...]:
    """Those among the limits' states; of limits on all tenants together a tenant reads no numbers."""
    return tuple(
        Refill(limit.meter.value, limit.rate_per_s, limit.ceiling_per_s, state.refill_per_s)
        for state in states
        if (limit := state.limit).rate_per_s is not None
        and limit.ceiling_per_s is not None
        and state.refill_per_s is not None
        and limit.kind is not SubjectKind.PLATFORM
    )


class Account(msgspec.Struct, frozen=True):
    """What a request was promised, what it got, what it paid."""

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
    """The counter of its tokens, see `gateway.upstream.base.CountedOutcome`; `engine`: our own."""
    decisions: Sequence[Decision] = ()
    """What the engines' schedulers decided about it."""
    decode: DecodeShare | None = None
    """How its tokens came; None: an upstream that says nothing of it computed them, or none did."""
    moves: Sequence[TierMove] = ()
    """Between tiers, while it waited."""
    redemption: Redemption | None = None
    """The verdict on its quote; None: it had none."""
    reasoning_tokens: int = 0
    """Of the output, as other servers say."""
    incomplete: str = ""
    """What was cut in the middle: `tool_calls`, `json` or nothing (empty)."""
    unknown_finish: str = ""
    """The finish reason of a server that is none that is known: shown as `stop`; empty: none."""
    fallback: Fallback | None = None
    """Which pool of its alias's chain took it; None: it asked for no chain."""
    refills: Sequence[Refill] = ()
    """Of the limits with a ceiling that it was held on."""

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
                    "kind": decision.kind,
                    "after_s": _rounded(decision.at_s),
                    "rule": decision.rule,
                    "rank": decision.rank,
                    # Not who they are: they may be another tenant's.
                    "others": len(decision.others),
                    "displaced_tokens": decision.displaced_tokens,
                }
                for decision in self.decisions
            ],
            "displaced": _displaced(self.decisions),
            "decode": None if self.decode is None else decode_as_json(self.decode),
            "moves": [
                {
                    "from": move.before.value,
                    "to": move.after.value,
                    "after_s": _rounded(move.after_s),
                    "by": move.by,
                }
                for move in self.moves
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
        if self.fallback is not None:
            shown["fallback"] = self.fallback.as_json()
        if self.refills:
            shown["refills"] = [msgspec.structs.asdict(refill) for refill in self.refills]
        if self.stop_cause is not None:
            shown["stop_cause"] = self.stop_cause
        if self.incomplete:
            shown["incomplete"] = self.incomplete
        if self.unknown_finish:
            shown["server_finish_reason"] = self.unknown_finish
        return shown


def decode_together(shares: Iterable[DecodeShare]) -> DecodeShare:
    """The sum over the sequences of a request; a step that two sat out counts twice."""
    listed = list(shares)
    if len(listed) == 1:
        return listed[0]
    sat_out_for: Counter[str] = Counter()
    for decision in listed:
        sat_out_for.update(decision.sat_out_for)
    return DecodeShare(
        floor_tokens=sum(decision.floor_tokens for decision in listed),
        turn_tokens=sum(decision.turn_tokens for decision in listed),
        sat_out_own=sum(decision.sat_out_own for decision in listed),
        sat_out_share=sum(decision.sat_out_share for decision in listed),
        sat_out_tier=sum(decision.sat_out_tier for decision in listed),
        sat_out_for=dict(sat_out_for),
    )


def decode_as_json(share: DecodeShare) -> dict[str, Any]:
    """How tokens came, without the names of other tenants."""
    return {
        "floor_tokens": share.floor_tokens,
        "turn_tokens": share.turn_tokens,
        "sat_out": {"own": share.sat_out_own, "share": share.sat_out_share, "tier": share.sat_out_tier},
    }


def _displaced(decisions: Sequence[Decision]) -> dict[str, int]:
    """What soft preemption did: `by_this` counts the tokens that others stood back for it (and how many times
    it took a place), `of_this` the tokens that it stood back for others (and how often it lost its place).

    Who they are is not told, for they may be another tenant's; `scheduling` has the rule of each case."""
    took = [decision for decision in decisions if decision.kind in TOOK_A_PLACE and decision.others]
    # A sequence that waits for memory has lost no place.
    lost = [decision for decision in decisions if decision.kind in LOST_ITS_PLACE and decision.others]
    return {
        "places_taken": sum(len(decision.others) for decision in took),
        "tokens_by_this": sum(decision.displaced_tokens for decision in took),
        "places_lost": len(lost),
        "tokens_of_this": sum(decision.displaced_tokens for decision in lost),
    }


def _account(held: int, charged: int) -> dict[str, int]:
    return {"held": held, "charged": charged, "refunded": held - charged}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
