"""Metering of one request: weighted amounts for limits, real tokens for bills.

Must not reference the request: the cycle would keep it alive until the next garbage collection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.domain.call import Call
from gateway.domain.usage import SequenceUse, use_of
from tenants.pricing.pricing import PriceBook, counted
from tenants.types import NOTHING, Amounts

MAX_SIZES = 16
"""Cached sizes per request, bounded as a long request keeps asking for new ones."""


def size_of(prices: PriceBook, call: Call, output_tokens: int) -> Amounts:
    """A request's prompt and `output_tokens` as limits count them, assuming no cached input."""
    return counted(prices, call.model, call.tier, input_tokens=call.input_tokens, output_tokens=output_tokens)


@dataclass(slots=True)
class RequestMetering:
    call: Call
    """A move to another tier replaces it."""
    prices: PriceBook
    uses: Sequence[SequenceUse]
    reported: Amounts = NOTHING
    """Real tokens of the last `report`: billed if all processes crash."""
    _sized: Call | None = None
    _sizes: dict[int, Amounts] = field(default_factory=dict)

    def size(self, output_tokens: int) -> Amounts:
        if self._sized is not self.call or len(self._sizes) >= MAX_SIZES:
            self._sized, self._sizes = self.call, {}
        found = self._sizes.get(output_tokens)
        if found is None:
            found = self._sizes[output_tokens] = size_of(self.prices, self.call, output_tokens)
        return found

    def report(self) -> Amounts:
        """Use so far as limits count it, never above the settlement's. Sets `reported`."""
        call = self.call
        use = use_of(self.uses, call.choices, dispatched=True)
        used = counted(
            self.prices,
            call.model,
            call.tier,
            input_tokens=use.input_tokens,
            cached_tokens=use.cached_tokens,
            output_tokens=use.output_tokens,
            gpu_ms=use.gpu_us // 1000,
        )
        self.reported = replace(used, input_tokens=use.input_tokens, output_tokens=use.output_tokens)
        return used
