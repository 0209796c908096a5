"""`fairgate price`: the price book, and token weights for limits."""

from __future__ import annotations

import click

from ops.cli.administer import administer
from ops.cli.base import answer
from ops.cli.options import Number
from ops.cli.resource_commands import groups, show_rows
from tenants.admin.cursor import MAX_PAGE
from tenants.resources.prices import PRICES

price = groups((PRICES,))["price"]


@price.command()
@click.argument("model")
@click.option("--most", type=Number(int, 1, MAX_PAGE), default=100, show_default=True, help="Rows at most.")
def history(model: str, most: int) -> None:
    """Shows every version of one model's prices, newest first.

    \b
    Ledger rows name the version they were charged by. --json answers what `price set` answers.
    """
    rows = administer(lambda admin: admin.prices.page_history(model, limit=most)).rows
    shown = [row.as_json() for row in rows]
    answer(shown, lambda: show_rows(PRICES, {"data": shown}))
