"""Exported usage has the columns, the digits and the safe text that readers of bills expect."""

from __future__ import annotations

import csv
import json
from typing import Any
from zoneinfo import ZoneInfo

from tenants.usage.export import FOCUS_COLUMNS, text_of

BERLIN = ZoneInfo("Europe/Berlin")
ROW: dict[str, Any] = {
    "start": "2026-10-31T00:00:00+01:00",
    "end": "2026-11-01T00:00:00+01:00",
    "tenant_id": "ten_1",
    "tenant": "=acme",
    "project_id": "prj_1",
    "project": "search",
    "key_id": "key_1",
    "key_name": None,
    "model": "small",
    "tier": "batch",
    "outcome": "completed",
    "label:team": "ads",
    "requests": 2,
    "input_tokens": 30,
    "cached_tokens": 10,
    "output_tokens": 12,
    "cost_nanousd": 1_000_000_007,
    "credit_nanousd": 5,
}
SHARED = {
    **dict.fromkeys(("InvoiceIssuerName", "ProviderName", "PublisherName", "ServiceName"), "Fairgate"),
    "BillingAccountId": "ten_1",
    "BillingAccountName": "'=acme",
    "BillingCurrency": "USD",
    "BillingPeriodStart": "2026-09-30T22:00:00Z",
    "BillingPeriodEnd": "2026-10-31T23:00:00Z",
    "ChargePeriodStart": "2026-10-30T23:00:00Z",
    "ChargePeriodEnd": "2026-10-31T23:00:00Z",
    "ServiceCategory": "AI and Machine Learning",
    "ServiceSubcategory": "Generative AI",
    "SkuId": "small/batch",
    "SkuPriceId": "small/batch",
    "ResourceId": "key_1",
    "SubAccountId": "prj_1",
    "SubAccountName": "search",
    "Tags": '{"fairgate/project":"search","fairgate/tier":"batch",'
    '"fairgate/outcome":"completed","team":"ads"}',
}
USED = {
    "ChargeCategory": "Usage",
    "ChargeFrequency": "Usage-Based",
    "PricingCategory": "Standard",
    "ChargeDescription": "Tokens of small in tier batch",
    "ConsumedQuantity": "42",
    "PricingQuantity": "42",
    "ConsumedUnit": "Tokens",
    "PricingUnit": "Tokens",
    "x_InputTokens": "30",
    "x_CachedInputTokens": "10",
    "x_OutputTokens": "12",
    "x_Requests": "2",
}
CREDITED = {
    "ChargeCategory": "Credit",
    "ChargeFrequency": "One-Time",
    "ChargeDescription": "Credit for missed quotes of small in tier batch",
}


def test_focus_has_what_was_used_and_what_was_credited_with_all_digits() -> None:
    text = text_of("focus", FOCUS_COLUMNS, [ROW], BERLIN, has_head=True)
    assert list(FOCUS_COLUMNS[:-4]) == sorted(FOCUS_COLUMNS[:-4]), "the specification's order, then our own"
    for charge, cost, expected in zip(
        csv.DictReader(text.splitlines()), ("1.000000007", "-0.000000005"), (USED, CREDITED), strict=True
    ):
        assert tuple(charge) == FOCUS_COLUMNS
        costs = dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost)
        assert {name: value for name, value in charge.items() if value} == SHARED | expected | costs


def test_plain_files_have_whole_numbers_and_later_parts_no_head() -> None:
    columns = ("tenant", "cost_nanousd")
    assert text_of("csv", columns, [ROW], BERLIN, has_head=False) == "'=acme,1000000007\r\n"
    assert json.loads(text_of("jsonl", (), [ROW], BERLIN, has_head=True)) == ROW
