"""Formats of exported usage: FOCUS 1.2, plain CSV, JSON lines. Pure.

Money is made of whole nano-dollars, with nine digits: sums of a file are exact. Conditional columns of FOCUS
that say nothing here are left out. So are unit prices: a row has input, cached input and output, each at a
price of its own, which may change within the row's time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from tenants.csv_table import csv_text
from tenants.usage.query import LABEL, midnight_us, next_month

FORMATS = {"focus": "text/csv", "csv": "text/csv", "jsonl": "application/x-ndjson"}
"""Format -> its media type."""
GROUPS_EXPORTED = ("tenant", "project", "key", "model", "tier")
FOCUS_COLUMNS = (
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargeFrequency",
    "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost",
    "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingCategory", "PricingQuantity", "PricingUnit",
    "ProviderName", "PublisherName", "ResourceId", "ResourceName", "ServiceCategory", "ServiceName",
    "ServiceSubcategory", "SkuId", "SkuPriceId", "SubAccountId", "SubAccountName", "Tags", "x_InputTokens",
    "x_CachedInputTokens", "x_OutputTokens", "x_Requests",
)  # fmt: skip
"""In the order of the specification, with all that it calls mandatory; then our own."""
_CONSTANT = {
    "BillingCurrency": "USD",
    "InvoiceIssuerName": "Fairgate",
    "ProviderName": "Fairgate",
    "PublisherName": "Fairgate",
    "ServiceCategory": "AI and Machine Learning",
    "ServiceName": "Fairgate",
    "ServiceSubcategory": "Generative AI",
}
_USED = ("requests", "input_tokens", "output_tokens", "cost_nanousd")
_TAGS = {"project": "project", "key_name": "key", "tier": "tier", "outcome": "outcome"}
"""Field -> tag: FOCUS wants a prefix for a provider's own tags, and none for the customer's (labels)."""


def text_of(
    form: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], zone: ZoneInfo, *, has_head: bool
) -> str:
    """A part of a file of format `form`. `rows`: as usage is shown, with names beside ids."""
    if form == "jsonl":
        return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)
    shown = (charge for row in rows for charge in focus_charges(row, zone)) if form == "focus" else rows
    return csv_text(columns if has_head else (), ([row.get(name) for name in columns] for row in shown))


def focus_charges(row: Mapping[str, Any], zone: ZoneInfo) -> Iterator[dict[str, Any]]:
    """One row of usage as charges of FOCUS: what was used, and what was credited. Billing periods are the
    zone's months."""
    start, end = (datetime.fromisoformat(row[name]).astimezone(zone) for name in ("start", "end"))
    tags = {f"fairgate/{tag}": row.get(field) for field, tag in _TAGS.items()}
    tags |= {name.removeprefix(LABEL): value for name, value in row.items() if name.startswith(LABEL)}
    sku = f"{row['model']}/{row['tier']}"
    shared = _CONSTANT | {
        "BillingAccountId": row["tenant_id"],
        "BillingAccountName": row["tenant"],
        "BillingPeriodEnd": _start(next_month(start.date()), zone),
        "BillingPeriodStart": _start(start.date().replace(day=1), zone),
        "ChargePeriodEnd": _utc(end),
        "ChargePeriodStart": _utc(start),
        "ResourceId": row["key_id"],
        "ResourceName": row["key_name"],
        "SkuId": sku,
        "SkuPriceId": sku,
        "SubAccountId": row["project_id"],
        "SubAccountName": row["project"],
        "Tags": {name: value for name, value in tags.items() if value is not None},
    }
    if any(row[name] for name in _USED):
        tokens = row["input_tokens"] + row["output_tokens"]
        yield (
            shared
            | _costs(row["cost_nanousd"])
            | {
                "ChargeCategory": "Usage",
                "ChargeDescription": f"Tokens of {row['model']} in tier {row['tier']}",
                "ChargeFrequency": "Usage-Based",
                "ConsumedQuantity": tokens,
                "ConsumedUnit": "Tokens",
                "PricingCategory": "Standard",
                "PricingQuantity": tokens,
                "PricingUnit": "Tokens",
                "x_InputTokens": row["input_tokens"],
                "x_CachedInputTokens": row["cached_tokens"],
                "x_OutputTokens": row["output_tokens"],
                "x_Requests": row["requests"],
            }
        )
    if row["credit_nanousd"]:
        yield (
            shared
            | _costs(-row["credit_nanousd"])
            | {
                "ChargeCategory": "Credit",
                "ChargeDescription": f"Credit for missed quotes of {row['model']} in tier {row['tier']}",
                "ChargeFrequency": "One-Time",
            }
        )


def _costs(nanousd: int) -> dict[str, Decimal]:
    cost = Decimal(nanousd).scaleb(-9)
    return dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost)


def _start(day: date, zone: ZoneInfo) -> str:
    return _utc(datetime.fromtimestamp(midnight_us(day, zone) // 1_000_000, UTC))


def _utc(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
