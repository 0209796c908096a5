"""`fairgate price`: the price book, and token weights for limits."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ops.cli.administer import actor, administer
from ops.cli.base import answer, group
from ops.reporting import table
from tenants.admin.commands import PriceSet
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.prices import PriceRow
from tenants.pricing.pricing import MAX_NANOUSD_PER_TOKEN, MAX_THOUSANDTHS
from tenants.types import Tier

MONEY = click.IntRange(0, MAX_NANOUSD_PER_TOKEN)
THOUSANDTHS = click.IntRange(0, MAX_THOUSANDTHS)
COLUMNS = (
    "model",
    "tier",
    "input",
    "cached",
    "output",
    "multiplier",
    "weights in/cached/out/reasoning",
    "version",
    "since",
)


@group()
def price() -> None:
    """The price book: integer nano-dollars a token (150 is 0.15 dollars a million), by model and tier.

    \b
      fairgate price set my-model --input 150 --cached 75 --output 600
      fairgate price set my-model --tier batch --multiplier 400
      fairgate price set my-model --cached-weight 100
      fairgate price set tiny-model --free
      fairgate price list
      fairgate price history my-model
    """


@price.command(name="set")
@click.argument("model")
@click.option("--input", "input_nanousd", type=MONEY, help="Nano-dollars for a token of input.")
@click.option(
    "--cached",
    "cached_input_nanousd",
    type=MONEY,
    help="The same for input found in the prefix cache.  [default for a new model: as --input]",
)
@click.option("--output", "output_nanousd", type=MONEY, help="The same for output.")
@click.option("--free", is_flag=True, help="It costs nothing, on purpose.")
@click.option(
    "--tier", type=click.Choice([tier.value for tier in Tier]), help="Only this tier.  [default: all]"
)
@click.option(
    "--multiplier",
    type=THOUSANDTHS,
    help="Thousandths by which the tier multiplies the price.  [default for a new model: tier_prices]",
)
@click.option(
    "--input-weight", type=THOUSANDTHS, help="Thousandths of a token that a token of input counts for limits."
)
@click.option("--cached-weight", "cached_input_weight", type=THOUSANDTHS, help="The same for cached input.")
@click.option("--output-weight", type=THOUSANDTHS, help="The same for output.")
@click.option("--reasoning-weight", type=THOUSANDTHS, help="The same for output that is reasoning.")
def set_(model: str, tier: str | None, free: bool, **changes: int | None) -> None:
    """Makes a new version of the price book, in force within a second.

    \b
    What is not named stays as it is. Requests that were admitted before are charged by the version they were
    admitted with. A model without a price is refused; --free is a price, too.
    --json answers the model's prices now:
      [{"version": 2, "model": "my-model", "tier": "interactive", "input_nanousd": 150,
        "cached_input_nanousd": 75, "output_nanousd": 600, "multiplier": 2000, "input_weight": 1000,
        "cached_input_weight": 1000, "output_weight": 1000, "reasoning_weight": 1000,
        "created_at": "2026-01-31T12:00:00+00:00"}, …]
    """
    if not free and all(value is None for value in changes.values()):
        raise click.UsageError("say what changes: --input, --cached, --output, a factor, or --free")
    wanted = PriceSet(model=model, tier=tier, free=free, **changes)
    rows = administer(lambda admin: admin.prices.set(actor(), wanted))
    answer([row.as_json() for row in rows], lambda: show(f"prices of {model}", rows))


@price.command(name="list")
def list_() -> None:
    """Lists the prices in force.

    \b
    --json answers what `price set` answers, of every model.
    """
    rows = administer(lambda admin: admin.prices.all())
    answer([row.as_json() for row in rows], lambda: show("prices", rows))


@price.command()
@click.argument("model")
@click.option(
    "--most", type=click.IntRange(1, MAX_PAGE), default=100, show_default=True, help="So many rows."
)
def history(model: str, most: int) -> None:
    """Shows every version of one model's prices, newest first.

    \b
    Ledger rows name the version they were charged by. --json answers what `price set` answers.
    """
    rows = administer(lambda admin: admin.prices.page_history(model, limit=most)).rows
    answer([row.as_json() for row in rows], lambda: show(f"versions of {model}", rows))


def show(title: str, rows: Sequence[PriceRow]) -> None:
    def cells(row: PriceRow) -> tuple[str, ...]:
        cost, weights = row.entry.price, row.entry.weights
        factors = (weights.input, weights.cached_input, weights.output, weights.reasoning)
        return (
            row.model,
            row.tier.value,
            str(cost.input_nanousd),
            str(cost.cached_input_nanousd),
            str(cost.output_nanousd),
            f"{row.entry.multiplier / 1000:g}",
            "/".join(f"{factor / 1000:g}" for factor in factors),
            str(row.version),
            f"{row.created_at:%Y-%m-%d %H:%M}",
        )

    table(title, COLUMNS, [cells(row) for row in rows])
