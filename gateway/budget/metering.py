"""What do limits count of a request, and what do bills say of it?

Before it runs by its size, while it runs by what came. A request holds this; nothing here refers back to it,
or each would stay in memory, with all that it holds, until the collector of cycles comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.domain.call import Call
from gateway.domain.usage import SequenceUse, use_of
from tenants.pricing.metering import counted
from tenants.pricing.pricing import PriceBook
from tenants.types import NOTHING, Amounts

MAX_SIZES = 16
"""Remembered of one request: a long one asks for ever new ones."""


def size_of(prices: PriceBook, call: Call, output_tokens: int) -> Amounts:
    """What limits count of a request's prompt and so many output tokens, if nothing of it was cached."""
    return counted(prices, call.model, call.tier, input_tokens=call.input_tokens, output_tokens=output_tokens)


@dataclass(slots=True)
class RequestMetering:
    """Of one request."""

    call: Call
    """As it stands: a move to another tier changes it."""
    prices: PriceBook
    uses: Sequence[SequenceUse]
    """By sequence, as they grow."""
    reported: Amounts = NOTHING
    """What bills say of what was last reported as used: should everybody die, that is what is charged."""
    _sized: Call | None = None
    """Whose sizes are known: of the call as it stood then."""
    _sizes: dict[int, Amounts] = field(default_factory=dict)

    def size(self, output_tokens: int) -> Amounts:
        """`size_of` the request. The same few numbers are asked for again and again before it runs."""
        if self._sized is not self.call or len(self._sizes) >= MAX_SIZES:
            self._sized, self._sizes = self.call, {}
        found = self._sizes.get(output_tokens)
        if found is None:
            found = self._sizes[output_tokens] = size_of(self.prices, self.call, output_tokens)
        return found

    def report(self) -> Amounts:
        """What limits count of what came so far: never more than the settlement will say. What bills say of
        it is noted in `reported`."""
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
