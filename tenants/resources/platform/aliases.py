"""Stored aliases of models. Those of the settings stand beside them in `GET /admin/v1/aliases`."""

from __future__ import annotations

from functools import partial

from sqlalchemy import Connection

from tenants.admin.cursor import PAGES
from tenants.admin.table_noun import TableNoun
from tenants.admin.transaction import Transactions
from tenants.errors import Invalid
from tenants.nouns.alias import MAX_ALIASES, AliasSet, Chain, ModelAlias, draft_of
from tenants.people.roles import Act
from tenants.resources.query import ListQuery
from tenants.resources.resource import Document, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.resources.table_acts import reading, removing, setting
from tenants.storage.tables import model_aliases


class AliasQuery(ListQuery, frozen=True):
    """All of them."""


def _check(transactions: Transactions, connection: Connection, made: ModelAlias) -> None:
    if made.name in transactions.models:
        raise Invalid("name", f"{made.name!r} is the name of a model: give the alias another one")
    models = made.alias.pools if isinstance(made.alias, Chain) else made.alias
    for other in STORED.rows(connection, [model_aliases.c.name.in_(list(models))]):
        raise Invalid("means", f"{other.name!r} is an alias, and so it could go in a circle: name models")


STORED = TableNoun(
    "alias",
    "aliases",
    model_aliases,
    ModelAlias,
    names=("name",),
    order=(model_aliases.c.name,),
    draft_of=draft_of,
    most=MAX_ALIASES,
    check=_check,
)
_ACT = partial(ResourceAct, scope="admin:write", act=Act.CHANGE_PLATFORM)
ALIASES = Resource(
    name="alias",
    plural="aliases/stored",
    title="Model aliases",
    query=AliasQuery,
    read=reading(STORED),
    order=STORED.order,
    as_json=STORED.as_json,
    find=STORED.find,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="List stored model aliases",
    description=f"Those of the settings and states are in `GET /admin/v1/aliases`. {PAGES}",
    page="aliases",
    menu="upstreams",
    empty=("No stored aliases", "Set one: another name for a model, for several by weight, or for a chain."),
    is_whole=True,
    shown=(
        Shown("id", "Id", on_page=False),
        Shown("name", "Alias"),
        Shown("means", "Means"),
        Shown("max_price", "Highest price", Form.FACTOR),
    ),
    acts=(
        _ACT(
            "alias.set",
            setting(STORED),
            command=AliasSet,
            status=201,
            summary="Set a model alias",
            form_title="Set an alias",
            hint="It replaces the alias of that name, also one of the settings. A gateway without one of its"
            " models leaves it out, and the page Upstreams says so. Requests for it are refused until it has"
            " a price of its own; a chain has those of its models.",
            done="The alias is set. All gateways follow within a second.",
            changes_rows=True,
            description="In force at all gateways within a second, in place of the alias of that name, also"
            " one of the settings. A gateway without one of its models leaves it out"
            " (`GET /admin/v1/aliases` says why). `means`: `my-model`; by weight `a = 3, b = 1`; a chain"
            " `a > b`.",
            answers="""{"id": "ali_…", "name": "big", "means": "a > b", "max_price": 1.5}""",
        ),
        _ACT(
            "alias.remove",
            removing(STORED),
            method="DELETE",
            path="/{reference}",
            summary="Remove a model alias",
            confirm=(
                "Requests for this name are refused (model_not_found), unless the settings have an alias of"
                " that name. Running requests go on.",
            ),
            done="The alias is removed.",
            description="By id, or by name.",
            answers="what `alias set` does.",
        ),
    ),
    document=Document.of(STORED, AliasSet, ("name",), "alias {name}", part_name="ConfigAlias"),
    group_help="""Other names of models, in force at all gateways without a restart.

    \b
      fairgate alias set big my-model
      fairgate alias set big "a = 3, b = 1"
      fairgate alias set safe "a > b" --max-price 1.5
      fairgate alias list
      fairgate alias remove big
    """,
    answers="what `alias set` answers, of every alias.",
)
