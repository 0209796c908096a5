"""Moves a waiting request to another tier, and prices the move.

The price book of its arrival applies. The hold is corrected and made durable first: a move that the budget
cannot cover changes nothing. If its turn comes while the ledger writes, it keeps its tier, on record.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from engine.messages import TIER_RANKS
from gateway import errors
from gateway.background import Site
from gateway.budget import lease
from gateway.budget.holds import BudgetDenied, Holds
from gateway.budget.metering import size_of
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.account import TierMove
from gateway.domain.call import Call
from gateway.domain.targets import RequestTargets
from gateway.domain.tiers import TIER_NAMES
from gateway.requests.run import Run
from tenants.pricing.pricing import PriceBook
from tenants.quota.rules import is_platforms
from tenants.quota.store import Denied, Granted
from tenants.types import NOTHING, Limit, LimitMode, Tier


@dataclass(frozen=True, slots=True)
class TierPrice:
    """Of one request in one tier."""

    tier: Tier
    input_nanousd: float
    """Per token, with the tier's multiplier."""
    cached_input_nanousd: float
    output_nanousd: float
    cost_nanousd: tuple[int, int, int]
    """Of this request: with its predicted output (p50, p90) and with the longest possible."""

    def as_json(self) -> dict[str, Any]:
        p50, p90, most = self.cost_nanousd
        return {
            "tier": self.tier.value,
            "service_tier": TIER_NAMES[self.tier],
            "price_per_token_nanousd": {
                "input": self.input_nanousd,
                "cached_input": self.cached_input_nanousd,
                "output": self.output_nanousd,
            },
            "cost_nanousd": {"p50": p50, "p90": p90, "max": most},
        }


@dataclass(frozen=True, slots=True)
class Offer:
    """Before and after the move."""

    before: TierPrice
    after: TierPrice


def tier_price(prices: PriceBook, call: Call, tier: Tier, predicted: tuple[int, int]) -> TierPrice:
    """`predicted`: output tokens of all its sequences, p50 and p90. Raises `UnknownPrice`."""
    of_input, of_cached, of_output = prices.entry(call.model, tier).token_picousd

    def cost(output_tokens: int) -> int:
        return prices.cost_nanousd(call.model, tier, call.input_tokens, 0, output_tokens)

    return TierPrice(
        tier,
        of_input / 1000,
        of_cached / 1000,
        of_output / 1000,
        (cost(predicted[0]), cost(predicted[1]), cost(call.max_output_tokens)),
    )


class TierChange:
    """Use from one event loop."""

    def __init__(self, site: Site, holds: Holds, dispatcher: Dispatcher) -> None:
        self._holds = holds
        self._dispatcher = dispatcher
        self._clock = site.clock
        self._wall_clock = site.wall_clock

    def offer(self, run: Run, tier: Tier) -> Offer:
        """Raises `UnknownPrice`."""
        call, sequences = run.call, run.call.sequences
        predicted = run.predicted_output_tokens * sequences, run.predicted_high_tokens * sequences
        return Offer(
            tier_price(run.prices, call, call.tier, predicted), tier_price(run.prices, call, tier, predicted)
        )

    async def move(self, run: Run, tier: Tier, by: str, targets: RequestTargets) -> Offer:
        """No-op for its own tier; `targets`: in the new one. Raises `ApiError`, `BudgetDenied`,
        `QuotaStoreUnavailable`, `DatabaseUnavailable`, `UnknownPrice`."""
        async with run.accounts:
            if run.status != "waiting":
                raise errors.not_waiting(status=run.status)
            offer = self.offer(run, tier)
            before = run.call
            if tier is before.tier:
                return offer
            after = replace(before, tier=tier)
            limits = _limits_of_both(before, tier, self._wall_clock())
            granted = await self._hold(run, after, limits)
            deadlines_s = targets.deadline_s, targets.own_deadline_s
            if not self._dispatcher.move(before.request_id, TIER_RANKS[tier], deadlines_s):
                await self._holds.move(before, NOTHING, NOTHING)
                raise errors.not_waiting(status="running")
            run.call, run.targets = after, targets
            run.moves.append(TierMove(before.tier, tier, self._clock() - run.times.arrived_s, by))
            assert run.leases is not None
            # Nothing has been emitted: what is covered is counted anew, in the new tier's units.
            run.leases.limits = limits
            run.leases.counting.call = after
            run.leases.covered_output_tokens = 0
            run.leases.tokens = []
            run.leases.granted(granted.covered)
            run.limit_states = granted.states
            return offer

    async def _hold(self, run: Run, call: Call, limits: tuple[Limit, ...]) -> Granted:
        """Holds durably what `call` needs in its new tier. Raises `BudgetDenied`."""
        sizes = partial(size_of, run.prices, call)
        may_be_cut = call.may_be_cut
        hold = lease.first_hold(
            limits,
            sizes,
            lambda _: 0,  # device time costs the same in every tier: what is held of it stays
            call.sequences,
            run.predicted_tokens_to_hold * call.sequences,
            call.max_output_tokens,
            may_be_cut=may_be_cut,
        )
        if may_be_cut:
            return await self._holds.move(call, hold.first, hold.ahead)
        # What was promised to it was its worst case in the old tier; that of the new one is held whole.
        # But by a bucket which cannot: only a short answer is held whole there as well.
        is_in_part = hold.first != hold.most and any(
            limit.is_bucket and limit.mode is LimitMode.HARD for limit in limits
        )
        granted = await self._holds.move(call, hold.first if is_in_part else hold.most, hold.most)
        promised = size_of(run.prices, run.call, call.max_output_tokens)
        for state in granted.states if is_in_part else ():
            limit = state.limit
            wanted = hold.most.of(limit.meter)
            is_window = limit.window is not None and limit.mode is LimitMode.HARD
            if is_window and wanted > promised.of(limit.meter) and state.available == 0:
                # A bucket cannot hold the worst case, so a window was not made to either: it stopped short.
                await self._holds.move(run.call, NOTHING, NOTHING)
                raise BudgetDenied(Denied(limit, wanted, 0, None, granted.states))
        return granted


def _limits_of_both(call: Call, tier: Tier, now_s: float) -> tuple[Limit, ...]:
    """The limits in both tiers. Raises `ApiError` if they differ: a hold cannot move between limits."""
    limits = call.limits_at(now_s, tier)
    for limit in set(limits) ^ set(call.limits_at(now_s)):
        # Of a platform's limit a tenant reads no meter.
        raise errors.tier_has_limits(limit.tier or tier, None if is_platforms(limit) else limit.meter)
    return limits
