"""Charges for requests whose gateway died.

Pure. The best source decides, and the settle row names it (`basis`):

- `engine`: its outcomes say what was computed and emitted, to the token;
- `last_report`: no engine knows of it, so the engine died as well, or never got it. Charged is what the last
  top-up row reported as used. What was emitted afterwards, at most up to what was held (`uncertain_tokens`),
  is unknown and not charged. A request that was never topped up is charged nothing.

(`gateway` is the third: the engine died under a live gateway, see `gateway/requests/lifecycle.py`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import SequenceOutcome
from gateway.domain.outcomes import RequestOutcome
from gateway.domain.usage import use_of_outcomes
from tenants.ledger.rows import AMOUNT_FIELDS, OpenRequest, amounts_from, as_list
from tenants.pricing.metering import counted
from tenants.pricing.pricing import PriceBook
from tenants.types import Amounts


class CrashCharge(msgspec.Struct, frozen=True):
    """The amounts and details of the settle row."""

    outcome: RequestOutcome
    charged: Amounts
    """Tokens as they were, for bills."""
    counted: Amounts
    """The same as limits count it, never more than was held."""
    detail: dict[str, Any]


def reckon(open_request: OpenRequest, outcomes: Sequence[SequenceOutcome], prices: PriceBook) -> CrashCharge:
    """The charge from `outcomes`, all that any engine kept of this request. Raises `UnknownPrice`."""
    held = open_request.held
    detail: dict[str, Any] = {
        "held": as_list(held),
        "top_ups": len(open_request.top_ups),
        "reserved_by": open_request.reserve.gateway_id,
        "engine_counted": len(outcomes),
    }
    if outcomes:
        return _by_engine(open_request, outcomes, prices, detail)
    used = open_request.used
    detail |= {
        "basis": "last_report",
        "uncertain_tokens": max(0, held.output_tokens - used.output_tokens),
    }
    reported = open_request.top_ups[-1].detail.get("tokens") if open_request.top_ups else None
    charged = used if reported is None else amounts_from(reported)
    return CrashCharge(RequestOutcome.LOST, charged, within(used, held), detail)


def _by_engine(
    open_request: OpenRequest, outcomes: Sequence[SequenceOutcome], prices: PriceBook, detail: dict[str, Any]
) -> CrashCharge:
    reserve, held = open_request.reserve, open_request.held
    prompts = [int(tokens) for tokens in reserve.detail.get("prompt_tokens", [held.input_tokens])]
    use = use_of_outcomes(outcomes, prompts, max(1, int(reserve.detail.get("choices", 1))))
    limited = counted(
        prices,
        reserve.model,
        tier_of(open_request),
        input_tokens=use.input_tokens,
        output_tokens=use.output_tokens,
        cached_tokens=use.cached_tokens,
        requests=held.requests,
        gpu_ms=use.gpu_ms,
    )
    charged = Amounts(
        input_tokens=use.input_tokens,
        output_tokens=use.output_tokens,
        cost_nanousd=min(limited.cost_nanousd, held.cost_nanousd),
        requests=held.requests,
        gpu_ms=use.gpu_ms,
    )
    detail |= {
        "basis": "engine",
        "uncertain_tokens": 0,
        "cached_tokens": use.cached_tokens,
        "finish": sorted({each.finish for each in outcomes}),
    }
    return CrashCharge(RequestOutcome.RECOVERED, charged, within(limited, held), detail)


def tier_of(open_request: OpenRequest) -> str:
    """The tier that it is charged in: that of the newest row, as it may have changed while it waited."""
    return open_request.top_ups[-1].tier if open_request.top_ups else open_request.reserve.tier


def within(amounts: Amounts, held: Amounts) -> Amounts:
    """Bounds each meter by what was held; GPU time, known only after a step, is not bounded."""
    return Amounts(
        **{
            name: getattr(amounts, name)
            if name == "gpu_ms"
            else min(getattr(amounts, name), getattr(held, name))
            for name in AMOUNT_FIELDS
        }
    )
