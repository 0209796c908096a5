"""What tokens may cost, computed again from prices and from what a settle row says."""

from __future__ import annotations

from typing import Any

import pytest

from tenants.ledger.price_check import due
from tenants.pricing.pricing import Price, PriceEntry

ENTRY = PriceEntry(Price(100, 50, 300), multiplier=1_500)


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ({"cached_tokens": 0}, (2_400, 2_400)),  # (10 x 100 + 2 x 300) x 1.5
        ({"cached_tokens": 4}, (2_100, 2_100)),
        ({"cached_tokens": 400}, (1_650, 1_650)),  # no more than the input
        ({"cached_tokens": 4, "held": [10, 2, 2_000]}, (2_000, 2_000)),  # within what was held
        ({"cached_tokens": 4, "held": [10, 2, 9_000, 1, 0]}, (2_100, 2_100)),
        ({}, (1_650, 2_400)),  # the cached part is not known
        ({"held": [10, 2, 2_000]}, (1_650, 2_000)),
        ({"cached_tokens": "4", "held": "x"}, (1_650, 2_400)),
    ],
)
def test_a_charge_is_what_its_tokens_cost(detail: dict[str, Any], expected: tuple[int, int]) -> None:
    assert due(ENTRY, 10, 2, detail) == expected
