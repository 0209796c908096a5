"""Steps for prices: what a file says of a model in all tiers and in each, as price book entries. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict, replace

from tenants.config_file.base import Place
from tenants.config_file.document import ConfigPrice
from tenants.config_file.steps import ConfigStep, NamedOnce, differences, standing_at
from tenants.nouns import checks
from tenants.pricing.price_row import PriceSet, changed, entry_columns
from tenants.pricing.pricing import PriceBook, PriceEntry
from tenants.types import Tier

Placed = tuple[ConfigPrice, Place]


def price_steps(
    wanted: Sequence[ConfigPrice], book: PriceBook, multipliers: Mapping[Tier, int], place: Place
) -> Iterator[ConfigStep]:
    """In the order of the file. `multipliers`: of a model without a price."""
    models: dict[str, dict[Tier | None, Placed]] = {}
    seen = NamedOnce()
    for number, part in enumerate(wanted):
        at = (*place, number)
        with standing_at(at):
            model = checks.model("model", part.model)
            tier = None if part.tier is None else checks.choice("tier", Tier, part.tier)
        seen.add((model, tier), f"model {model!r} in {'all tiers' if tier is None else f'tier {tier}'}", at)
        models.setdefault(model, {})[tier] = part, at
    for model, parts in models.items():
        yield from _steps_of(model, parts, book, multipliers)


def _steps_of(
    model: str, parts: Mapping[Tier | None, Placed], book: PriceBook, multipliers: Mapping[Tier, int]
) -> Iterator[ConfigStep]:
    steps: list[tuple[Tier, PriceSet, ConfigStep]] = []
    for tier in Tier:
        placed = parts.get(tier) or parts.get(None)
        if placed is None:
            continue
        command = _command(model, tier, parts)
        old = book.entries.get((model, tier))
        with standing_at(placed[1]):
            new = changed(old, command, multipliers[tier])
        changes = differences(_record(model, tier, old), _record(model, tier, new))
        if changes:
            what = f"prices of {model} in tier {tier}"
            steps.append((tier, command, ConfigStep("price.set", what, placed[1], command, changes)))
    alike = {tuple(asdict(replace(command, tier=None)).items()) for _, command, _ in steps}
    if len(steps) == len(Tier) and len(alike) == 1:
        together = {name: pair for _, _, step in steps for name, pair in step.changes.items()}
        yield ConfigStep(
            "price.set", f"prices of {model}", steps[0][2].place, replace(steps[0][1], tier=None), together
        )
        return
    for _, _, step in steps:
        yield step


def _record(model: str, tier: Tier, entry: PriceEntry | None) -> Mapping[str, Any] | None:
    """As the audit has it."""
    if entry is None:
        return None
    return {tier.value: {"model": model, "tier": tier.value, **entry_columns(entry)}}


def _command(model: str, tier: Tier, parts: Mapping[Tier | None, Placed]) -> PriceSet:
    """What the file says of all tiers, overridden by what it says of this one."""
    given: dict[str, Any] = {}
    for key in (None, tier):
        if key in parts:
            fields = asdict(parts[key][0])
            given |= {
                name: value
                for name, value in fields.items()
                if name not in ("model", "tier") and value is not None
            }
    return PriceSet(model=model, tier=tier.value, **given)
