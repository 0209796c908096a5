"""What does a request cost?

Integer nano-dollars (a billionth of a dollar) per token, times the tier's multiplier in thousandths,
rounded up once at the end. The cost never falls when tokens are added, so what is quoted for the most
tokens bounds what is charged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tenants.errors import Invalid, UnknownPrice
from tenants.types import Tier

MAX_NANOUSD_PER_TOKEN = 1_000_000_000
"""A dollar a token."""
MAX_THOUSANDTHS = 100_000
MAX_MODELS = 1_000
MAX_TOKENS = 10_000_000

DEFAULT_MULTIPLIERS: Mapping[Tier, int] = MappingProxyType(
    {Tier.INTERACTIVE: 2_000, Tier.STANDARD: 1_000, Tier.BATCH: 500}
)
"""Thousandths of the list price: going first costs twice as much, going last half."""


@dataclass(frozen=True, slots=True)
class Price:
    """Nano-dollars per token of one model, in the standard tier."""

    input_nanousd: int
    cached_input_nanousd: int
    output_nanousd: int

    def __post_init__(self) -> None:
        for name in ("input_nanousd", "cached_input_nanousd", "output_nanousd"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not 0 <= value <= MAX_NANOUSD_PER_TOKEN
            ):
                raise Invalid(
                    name, f"must be a whole number between 0 and {MAX_NANOUSD_PER_TOKEN} nano-dollars"
                )
        if self.cached_input_nanousd > self.input_nanousd:
            raise Invalid("cached_input_nanousd", "must not exceed the price of input that is not cached")


FREE = Price(0, 0, 0)


@dataclass(frozen=True, slots=True)
class PriceBook:
    """Prices by model name; a model is free only where its price says so (`FREE`)."""

    prices: Mapping[str, Price] = field(default_factory=dict)
    multipliers: Mapping[Tier, int] = field(default_factory=lambda: DEFAULT_MULTIPLIERS)
    version: int = 1
    """Grows with every change; a quote names the version it was made with."""

    def __post_init__(self) -> None:
        if len(self.prices) > MAX_MODELS:
            raise Invalid("prices", f"at most {MAX_MODELS} models")
        for tier in Tier:
            value = self.multipliers.get(tier)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_THOUSANDTHS:
                raise Invalid("multipliers", f"{tier.value}: must be 0 to {MAX_THOUSANDTHS} thousandths")

    def price(self, model: str) -> Price:
        """The model's price. Raises `UnknownPrice`."""
        try:
            return self.prices[model]
        except KeyError:
            raise UnknownPrice(model) from None

    def cost_nanousd(
        self, model: str, tier: Tier | str, input_tokens: int, cached_tokens: int, output_tokens: int
    ) -> int:
        """Cost of a request. `input_tokens` is the whole prompt, `cached_tokens` the part of it that was
        found in the prefix cache (OpenAI counts so, too). Raises `UnknownPrice`, or `Invalid` for
        impossible counts."""
        for name, value in (("input_tokens", input_tokens), ("output_tokens", output_tokens)):
            if not 0 <= value <= MAX_TOKENS:
                raise Invalid(name, f"must lie between 0 and {MAX_TOKENS}")
        if not 0 <= cached_tokens <= input_tokens:
            raise Invalid("cached_tokens", "must lie between 0 and input_tokens")
        price = self.price(model)
        list_price = (
            (input_tokens - cached_tokens) * price.input_nanousd
            + cached_tokens * price.cached_input_nanousd
            + output_tokens * price.output_nanousd
        )
        return -(-list_price * self.multipliers[Tier(tier)] // 1_000)
