"""Prices and the cost of a request.

Integer nano-dollars (billionths of a dollar) per token, times the tier's multiplier in thousandths, rounded
up once. The cost is monotone in tokens, so a quote for the most tokens bounds the charge. A `PriceBook` is
one immutable version of all prices: a request is charged by the version it was reserved with.

For limits a token counts as one unless the price book weights a model's tokens in a tier: cached input may
count less, a large model's tokens more. Holds, top-ups and settlements use these units, bills real tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from tenants.errors import Invalid, UnknownPrice
from tenants.types import Amounts, Tier

MAX_NANOUSD_PER_TOKEN = 1_000_000_000
"""A dollar a token."""
MAX_THOUSANDTHS = 100_000
MAX_MODELS = 1_000
MAX_TOKENS = 10_000_000

DEFAULT_MULTIPLIERS: Mapping[Tier, int] = MappingProxyType(
    {Tier.INTERACTIVE: 2_000, Tier.STANDARD: 1_000, Tier.BATCH: 500}
)
"""Thousandths of the list price: interactive costs twice as much, batch half."""


@dataclass(frozen=True, slots=True)
class Price:
    """Nano-dollars per token of one model, before the tier's multiplier."""

    input_nanousd: int
    cached_input_nanousd: int
    output_nanousd: int

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not 0 <= value <= MAX_NANOUSD_PER_TOKEN
            ):
                raise Invalid(
                    part.name, f"must be a whole number between 0 and {MAX_NANOUSD_PER_TOKEN} nano-dollars"
                )
        if self.cached_input_nanousd > self.input_nanousd:
            raise Invalid("cached_input_nanousd", "must not exceed input_nanousd: lower it or raise that")


FREE = Price(0, 0, 0)


def thousandths(name: str, value: int) -> int:
    """Raises `Invalid` naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_THOUSANDTHS:
        raise Invalid(name, f"must be 0 to {MAX_THOUSANDTHS} thousandths (1000: one)")
    return value


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Thousandths of a token limit's unit that one token counts. `cached_input`: input found in the prefix
    cache; `reasoning`: hidden output. Neither may exceed the weight of what it is a part of: its share of a
    request is unknown when it is held, and the hold must cover it."""

    input: int = 1_000
    cached_input: int = 1_000
    output: int = 1_000
    reasoning: int = 1_000

    def __post_init__(self) -> None:
        for part in fields(self):
            thousandths(f"{part.name}_weight", getattr(self, part.name))
        if self.cached_input > self.input:
            raise Invalid("cached_input_weight", "must not exceed input_weight: lower it too, or raise that")
        if self.reasoning > self.output:
            raise Invalid("reasoning_weight", "must not exceed output_weight: lower it too, or raise that")


PLAIN = TokenWeights()


@dataclass(frozen=True, slots=True)
class PriceEntry:
    """Price, multiplier (in thousandths) and weights of one model in one tier."""

    price: Price
    multiplier: int
    weights: TokenWeights = PLAIN

    def __post_init__(self) -> None:
        thousandths("multiplier", self.multiplier)

    @property
    def token_picousd(self) -> tuple[int, int, int]:
        """Of one token, the multiplier applied: input, cached input, output."""
        price, factor = self.price, self.multiplier
        return (
            price.input_nanousd * factor,
            price.cached_input_nanousd * factor,
            price.output_nanousd * factor,
        )

    def cost_nanousd(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Without checks; see `PriceBook.cost_nanousd`."""
        price = self.price
        list_price = (
            (input_tokens - cached_tokens) * price.input_nanousd
            + cached_tokens * price.cached_input_nanousd
            + output_tokens * price.output_nanousd
        )
        return -(-list_price * self.multiplier // 1_000)


@dataclass(frozen=True, slots=True)
class PriceBook:
    """All prices of one version. A model is free only with an explicit price of zero (`FREE`)."""

    entries: Mapping[tuple[str, Tier], PriceEntry] = field(default_factory=dict)
    version: int = 0
    """Grows with every change; ledger rows name the version they were charged by."""

    def __post_init__(self) -> None:
        if len(self.models) > MAX_MODELS:
            raise Invalid("prices", f"at most {MAX_MODELS} models")

    @property
    def models(self) -> set[str]:
        return {model for model, _ in self.entries}

    def entry(self, model: str, tier: Tier | str) -> PriceEntry:
        """Raises `UnknownPrice`."""
        try:
            return self.entries[model, tier]  # type: ignore[index]  # a tier is equal to its name
        except KeyError:
            raise UnknownPrice(model, str(tier)) from None

    def cost_nanousd(
        self, model: str, tier: Tier | str, input_tokens: int, cached_tokens: int, output_tokens: int
    ) -> int:
        """`input_tokens` include `cached_tokens` (as in OpenAI's usage). Raises `UnknownPrice`, `Invalid`."""
        check_counts(input_tokens, cached_tokens, output_tokens)
        return self.entry(model, tier).cost_nanousd(input_tokens, cached_tokens, output_tokens)


def check_counts(
    input_tokens: int, cached_tokens: int, output_tokens: int, reasoning_tokens: int = 0
) -> None:
    """Raises `Invalid` for impossible counts."""
    for name, value in (("input_tokens", input_tokens), ("output_tokens", output_tokens)):
        if not 0 <= value <= MAX_TOKENS:
            raise Invalid(name, f"must lie between 0 and {MAX_TOKENS}")
    if not 0 <= cached_tokens <= input_tokens:
        raise Invalid("cached_tokens", "must lie between 0 and input_tokens")
    if not 0 <= reasoning_tokens <= output_tokens:
        raise Invalid("reasoning_tokens", "must lie between 0 and output_tokens")


def uniform_book(
    prices: Mapping[str, Price], multipliers: Mapping[Tier, int] = DEFAULT_MULTIPLIERS, version: int = 1
) -> PriceBook:
    """A book with one list price per model and one multiplier per tier."""
    for tier in Tier:
        if tier not in multipliers:
            raise Invalid("multiplier", f"tier {tier.value} has none")
    entries = {
        (model, tier): PriceEntry(price, multipliers[tier])
        for model, price in prices.items()
        for tier in Tier
    }
    return PriceBook(entries, version)


def counted(
    book: PriceBook,
    model: str,
    tier: Tier | str,
    *,
    input_tokens: int,
    output_tokens: int,
    cached_tokens: int = 0,
    reasoning_tokens: int = 0,
    requests: int = 1,
    gpu_ms: int = 0,
) -> Amounts:
    """A request as limits count it: weighted tokens, each sum rounded up once, and its cost. `cached_tokens`
    are part of the input, `reasoning_tokens` of the output; monotone in tokens, so without these two it
    bounds the charge. Raises `UnknownPrice`, or `Invalid` for impossible counts."""
    check_counts(input_tokens, cached_tokens, output_tokens, reasoning_tokens)
    entry = book.entry(model, tier)
    weights = entry.weights
    inputs = (input_tokens - cached_tokens) * weights.input + cached_tokens * weights.cached_input
    outputs = (output_tokens - reasoning_tokens) * weights.output + reasoning_tokens * weights.reasoning
    return Amounts(
        input_tokens=-(-inputs // 1_000),
        output_tokens=-(-outputs // 1_000),
        cost_nanousd=entry.cost_nanousd(input_tokens, cached_tokens, output_tokens),
        requests=requests,
        gpu_ms=gpu_ms,
    )
