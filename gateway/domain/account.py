"""The account of a request: its estimate, its times, its charge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.messages import Decision, DecodeShare
from gateway.domain.estimate import Estimate, Times
from tenants.quota.spare import Refill, refill_of
from tenants.types import Amounts, Tier

if TYPE_CHECKING:
    from gateway.domain.fallback import Fallback
    from gateway.domain.quote_redemption import Redemption
    from tenants.quota.store import LimitState

TOOK_A_PLACE = frozenset({"admit", "resume"})
LOST_ITS_PLACE = frozenset({"pause", "suspend"})


@dataclass(frozen=True, slots=True)
class TierMove:
    before: Tier
    after: Tier
    after_s: float
    """Since its arrival."""
    by: str
    """`tenant` or `operator`."""


@dataclass(slots=True)
class ReplicaMove:
    """A running request went on at another replica."""

    before: str
    after: str
    cause: str
    """`lost` or `drained`: what became of the replica before."""
    after_s: float
    """Since its arrival."""
    recomputed_tokens: int
    """Prompt and output that the other one had to compute anew, uncharged."""
    since_s: float
    """On the gateway's clock."""
    pause_s: float | None = None
    """Until its next token; None: none came."""

    def as_json(self) -> dict[str, Any]:
        return {
            "from": self.before,
            "to": self.after,
            "cause": self.cause,
            "after_s": _rounded(self.after_s),
            "pause_s": _rounded(self.pause_s),
            "recomputed_tokens": self.recomputed_tokens,
        }


def refills_of(states: Iterable[LimitState]) -> tuple[Refill, ...]:
    refills = (refill_of(state.limit, state.refill_per_s) for state in states)
    return tuple(refill for refill in refills if refill is not None)


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
    upstream: str | None = None
    basis: str = "engine"
    decisions: Sequence[Decision] = ()
    decode: DecodeShare | None = None
    """None: unknown, or no tokens were computed."""
    moves: Sequence[TierMove] = ()
    replica_moves: Sequence[ReplicaMove] = ()
    redemption: Redemption | None = None
    reasoning_tokens: int = 0
    incomplete: str = ""
    """What was cut short: `tool_calls`, `json` or nothing (empty)."""
    closed: bool = False
    """Of an answer that was cut, its end was written so that it is valid."""
    not_enforced: Sequence[str] = ()
    """Of what the client asked its answer to be: field and reason."""
    unknown_finish: str = ""
    """A server's unknown finish reason, shown as `stop`; empty: none."""
    fallback: Fallback | None = None
    refills: Sequence[Refill] = ()

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
        if self.replica_moves:
            shown["replica_moves"] = [move.as_json() for move in self.replica_moves]
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
        if self.closed:
            shown["closed"] = True
        if self.not_enforced:
            shown["not_enforced"] = self.not_enforced
        if self.unknown_finish:
            shown["server_finish_reason"] = self.unknown_finish
        return shown


def decode_together(shares: Iterable[DecodeShare]) -> DecodeShare:
    """Sums over the sequences of a request; a step that two sat out counts twice."""
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
    """Without the names of other tenants."""
    return {
        "floor_tokens": share.floor_tokens,
        "turn_tokens": share.turn_tokens,
        "sat_out": {"own": share.sat_out_own, "share": share.sat_out_share, "tier": share.sat_out_tier},
    }


def _displaced(decisions: Sequence[Decision]) -> dict[str, int]:
    """What soft preemption did to others (`by_this`) and to it (`of_this`): tokens stood back and places
    lost. Others may be other tenants' and are not named."""
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
