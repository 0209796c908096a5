"""Prices in force: of a model in a tier."""

from __future__ import annotations

from typing import Annotated

from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.cursor import PAGES, SortKey
from tenants.admin.prices import history, in_force
from tenants.nouns import checks
from tenants.people.roles import Act
from tenants.pricing.price_row import PriceRow, PriceSet, as_stored
from tenants.resources.query import Filter, ListQuery
from tenants.resources.resource import ActCall, ActDone, PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.storage.tables import prices
from tenants.types import Tier


class PriceQuery(ListQuery, frozen=True):
    """Which prices. None: any."""

    model: Annotated[str | None, Filter(prices.c.model, most=checks.MAX_MODEL_CHARS)] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[PriceRow], SortKey | None]:
    model, after = request.query.model, request.after
    rows = [row for row in in_force(connection) if model in (None, row.model)]
    rows.sort(key=_key_of)
    return [row for row in rows if after is None or _key_of(row) > after], None


def _key_of(row: PriceRow) -> tuple[str, int]:
    return row.model, list(Tier).index(row.tier)


async def _set(admin: Admin, call: ActCall) -> ActDone:
    rows = await admin.prices.set(call.actor, call.command, if_match=call.if_match)
    return ActDone({"object": "list", "data": [row.as_json() for row in rows]}, as_stored(rows))


SHOWN = (
    Shown("model", "Model", link="/console/prices/history?model={model}"),
    Shown("tier", "Tier"),
    Shown("input_nanousd", "Input", Form.TOKEN_PRICE),
    Shown("cached_input_nanousd", "Cached", Form.TOKEN_PRICE),
    Shown("output_nanousd", "Output", Form.TOKEN_PRICE),
    Shown("multiplier", "Multiplier", Form.THOUSANDTHS),
    Shown("input_weight", "Input weight", Form.THOUSANDTHS),
    Shown("cached_input_weight", "Cached weight", Form.THOUSANDTHS),
    Shown("output_weight", "Output weight", Form.THOUSANDTHS),
    Shown("reasoning_weight", "Reasoning weight", Form.THOUSANDTHS),
    Shown("version", "Version"),
    Shown("created_at", "Since", Form.INSTANT),
)


PRICES = Resource(
    name="price",
    plural="prices",
    title="Prices",
    query=PriceQuery,
    read=_read,
    order=lambda query: (str, int),
    key_of=_key_of,
    as_json=PriceRow.as_json,
    stored_list=lambda query, rows: None if query.model is None else as_stored(rows),
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="The prices in force, by model and tier",
    description="Money in nano-dollars a token before the multiplier; multiplier and weights in thousandths."
    f" `model`: those of one, with their `ETag`. {PAGES}",
    empty=("No prices", "A model without a price is refused. Set one."),
    is_whole=True,
    shown=SHOWN,
    acts=(
        ResourceAct(
            "price.set",
            _set,
            is_partial=True,
            command=PriceSet,
            scope="admin:write",
            act=Act.CHANGE_PLATFORM,
            status=201,
            is_list=True,
            summary="Make a new version of the price book",
            form_title="Set a price",
            hint="Dollars per million tokens; empty fields stay as they are. Requests that were admitted"
            " before are charged at the price they were admitted with.",
            done="The price is set: it counts for requests from now on.",
            changes_rows=True,
            description="In force within a second. What is not named stays as it is; requests that were"
            " admitted before are charged by the version they were admitted with. A model without a price is"
            " refused; `free` is a price.",
            answers="""the model's prices now:
      [{"version": 2, "model": "my-model", "tier": "interactive", "input_nanousd": 150,
        "cached_input_nanousd": 75, "output_nanousd": 600, "multiplier": 2000, "input_weight": 1000,
        "cached_input_weight": 1000, "output_weight": 1000, "reasoning_weight": 1000,
        "created_at": "2026-01-31T12:00:00+00:00"}, …]
    """,
        ),
    ),
    group_help="""The price book: prices by model and tier.

    In nano-dollars per token: 150 is $0.15 per million tokens.

    \b
      fairgate price set my-model --input 150 --cached 75 --output 600
      fairgate price set my-model --tier batch --multiplier 400
      fairgate price set my-model --cached-weight 100
      fairgate price set tiny-model --free
      fairgate price list
      fairgate price history my-model
    """,
    answers="what `price set` answers, of every model.",
)


def _versions(connection: Connection, request: PageRequest) -> tuple[list[PriceRow], SortKey | None]:
    rows = history(connection, request.query.model or "", request.after, request.most)
    return rows, None


PRICE_HISTORY = Resource(
    name="price",
    plural="prices/history",
    title="Price history",
    query=PriceQuery,
    read=_versions,
    order=(prices.c.version, prices.c.tier),
    key_of=lambda row: (row.version, row.tier.value),
    as_json=PriceRow.as_json,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="Every version of a model's prices, newest first",
    menu="prices",
    empty=("No prices of this model", "Name a model to see each version of its prices."),
    shown=(Shown("version", "Version"), *(one for one in SHOWN if one.name != "version")),
)
"""A page of the console; the API and the command line have a route and a command of their own."""
