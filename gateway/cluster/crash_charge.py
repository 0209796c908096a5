"""Charges for requests whose gateway died. Pure.

The best source decides, and the settle row names it (`basis`):

- `engine`: its outcomes, exact to the token;
- `gateway`: the engine died under a live gateway, see `gateway/requests/lifecycle.py`;
- `last_report`: no engine knows the request. It is billed by its last top-up row or the gateway's progress
  record, whichever says more. If the gateway's engines have lived on, it never reached one (`is_known`).
  Otherwise what was emitted after the report is unknown: limits count all that was held, the bill does not,
  and the row has the difference (`in_doubt`), which an operator can give back.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.messages import SequenceOutcome
from gateway.domain.usage import Use, longest_outcomes, use_of_outcomes
from tenants.ledger.progress import Progress
from tenants.ledger.rows import AMOUNT_FIELDS, OpenRequest, amounts_from, as_list, less
from tenants.outcomes import RequestOutcome
from tenants.pricing.pricing import PriceBook, counted
from tenants.types import Amounts


class CrashCharge(msgspec.Struct, frozen=True):
    """The amounts and details of the settle row."""

    outcome: RequestOutcome
    charged: Amounts
    """Actual tokens, for bills."""
    counted: Amounts
    """What limits count: never more than was held."""
    detail: dict[str, Any]


def is_known(request_id: str, model: str, progress: Progress, lives: Set[str]) -> bool:
    """Whether nothing was emitted, for certain. `lives`: of the engines asked; `progress`: its last
    record."""
    sent = progress.requests.get(request_id)
    if sent is not None:
        return sent.engine in lives and not sent.output_tokens
    # Sent after the record was written, if at all: to an engine that it names.
    return model in progress.models and progress.engines <= lives


def reckon(
    open_request: OpenRequest,
    outcomes: Sequence[SequenceOutcome],
    prices: PriceBook,
    progress: Progress | None = None,
    lives: Set[str] = frozenset(),
) -> CrashCharge:
    """The charge from all engines' outcomes. `progress` None: never sent. Raises `UnknownPrice`."""
    held = open_request.held
    detail: dict[str, Any] = {
        "held": as_list(held),
        "top_ups": len(open_request.top_ups),
        "reserved_by": open_request.reserve.gateway_id,
        "engine_counted": len(outcomes),
    }
    if outcomes:
        return _by_engine(open_request, longest_outcomes(outcomes), prices, detail)
    charged, counted_use = _last_report(open_request, prices, progress)
    detail |= {"basis": "last_report", "uncertain_tokens": 0}
    if progress is None or is_known(open_request.request_id, open_request.reserve.model, progress, lives):
        return CrashCharge(RequestOutcome.LOST, charged, counted_use, detail)
    whole = replace(held, gpu_ms=max(held.gpu_ms, counted_use.gpu_ms))
    detail |= {
        "uncertain_tokens": max(0, held.output_tokens - counted_use.output_tokens),
        "in_doubt": as_list(less(whole, counted_use)),
    }
    # A request and device time are no money: one column says what limits count of them.
    charged = replace(charged, requests=whole.requests, gpu_ms=whole.gpu_ms)
    return CrashCharge(RequestOutcome.LOST, charged, whole, detail)


def _last_report(
    open_request: OpenRequest, prices: PriceBook, progress: Progress | None
) -> tuple[Amounts, Amounts]:
    """The last reported use: as billed, and as limits count it."""
    held, used = open_request.held, open_request.used
    reported = open_request.top_ups[-1].detail.get("tokens") if open_request.top_ups else None
    charged = used if reported is None else amounts_from(reported)
    sent = None if progress is None else progress.requests.get(open_request.request_id)
    if sent is None or sent.output_tokens <= charged.output_tokens:
        return charged, within(used, held)
    use = Use(
        sent.input_tokens, 0, sent.cached_tokens, sent.output_tokens, dispatched=True, gpu_us=sent.gpu_us
    )
    return _charge_of(open_request, use, prices)


def _charge_of(open_request: OpenRequest, use: Use, prices: PriceBook) -> tuple[Amounts, Amounts]:
    """As billed, and as limits count it."""
    held = open_request.held
    limited = counted(
        prices,
        open_request.reserve.model,
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
    return charged, within(limited, held)


def _by_engine(
    open_request: OpenRequest, outcomes: Sequence[SequenceOutcome], prices: PriceBook, detail: dict[str, Any]
) -> CrashCharge:
    reserve, held = open_request.reserve, open_request.held
    prompts = [int(tokens) for tokens in reserve.detail.get("prompt_tokens", [held.input_tokens])]
    use = use_of_outcomes(outcomes, prompts, max(1, int(reserve.detail.get("choices", 1))))
    charged, limited = _charge_of(open_request, use, prices)
    detail |= {
        "basis": "engine",
        "uncertain_tokens": 0,
        "cached_tokens": use.cached_tokens,
        "finish": sorted({outcome.finish for outcome in outcomes}),
    }
    return CrashCharge(RequestOutcome.RECOVERED, charged, limited, detail)


def tier_of(open_request: OpenRequest) -> str:
    """The tier of the newest row: it may have changed while the request waited."""
    return open_request.top_ups[-1].tier if open_request.top_ups else open_request.reserve.tier


def within(amounts: Amounts, held: Amounts) -> Amounts:
    """Bounds each meter by what was held, except GPU time, which is known only after a step."""
    return Amounts(
        **{
            name: getattr(amounts, name)
            if name == "gpu_ms"
            else min(getattr(amounts, name), getattr(held, name))
            for name in AMOUNT_FIELDS
        }
    )
