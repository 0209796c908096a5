"""The page of recovery: what tenants were charged against what the engines cost."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from litestar import Request, Response

from gateway.console.access import page, visit_of
from gateway.console.form_errors import FormProblem
from gateway.console.pages.money.amounts import SummedUsage, amounts_of
from gateway.console.pages.money.recovery_view import Recovery, all_pools, by_pool, unused_us
from gateway.console.pages.money.usage import PATH as USAGE
from gateway.console.pages.questions import FILTER_ERRORS, asked_of, filter_problem
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.pools.catalogue import Alias, Chain
from gateway.routes.context import gateway_of
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.engine_time import MOST_RESERVED
from tenants.admin.lists.usage import UsageAsked
from tenants.counts.minute_store import HOUR_US
from tenants.directory.records import Tenant, from_us
from tenants.errors import Invalid
from tenants.people.roles import Act

PATH = "/console/usage/recovery"
HOURS = {"24": "24 hours", "168": "7 days", "312": "13 days"}
"""Minutes of engines are kept for 14 days."""
NANO = 1_000_000_000
MOST_USD = 1_000_000


def hour_nanousd(text: str, setting_usd: float) -> int:
    """As typed, else as configured. Raises `Invalid`."""
    if not text:
        return round(Decimal(repr(setting_usd)) * NANO)
    try:
        price = Decimal(text)
    except InvalidOperation:
        price = Decimal(-1)
    if not price.is_finite() or not 0 <= price <= MOST_USD:
        raise Invalid(
            "price", f"{text[:40]!r} is not an amount of US dollars up to {MOST_USD:,}, such as 2.50"
        )
    return round(price * NANO)


def reservations(tenants: list[Tenant]) -> dict[str, float]:
    """The largest reservations by tenant, in cost tokens a second."""
    held = [tenant for tenant in tenants if tenant.reserved_tokens_per_s > 0]
    held.sort(key=lambda tenant: (-tenant.reserved_tokens_per_s, tenant.tenant_id))
    return {tenant.tenant_id: tenant.reserved_tokens_per_s for tenant in held[:MOST_RESERVED]}


def pool_of(model: str, aliases: Mapping[str, Alias]) -> str:
    """The pool of a charged model's name; the name itself if it stands for several."""
    means = aliases.get(model)
    pools = (
        [] if means is None or isinstance(means, Chain) else [name for name, part in means.items() if part]
    )
    return pools[0] if len(pools) == 1 else model


@page(PATH, act=Act.READ_PLATFORM)
async def recovery_page(request: Request[Any, Any, Any]) -> Response[str]:
    deps = gateway_of(request).deps
    asked = asked_of(request, "hours", "price")
    asked["hours"] = asked["hours"] or "168"
    try:
        if asked["hours"] not in HOURS:
            raise Invalid("hours", f"is not one of {', '.join(HOURS)}")
        price = hour_nanousd(asked["price"], deps.config.engine_hour_usd)
        to_us = round(deps.wall_clock() * 1e6) // HOUR_US * HOUR_US
        from_us_ = to_us - int(asked["hours"]) * HOUR_US
        pools, total = await _recovered(request, from_us_, to_us, price)
    except FILTER_ERRORS as error:
        return _shown(request, asked, problem=filter_problem(error, ("hours", "price")))
    begin, end = from_us(from_us_).isoformat(), from_us(to_us).isoformat()
    links = {
        pool.time.pool: with_query(
            USAGE, {"model": pool.time.pool, "from": begin, "to": end, "window": "total"}
        )
        for pool in pools
    }
    whole = with_query(USAGE, {"from": begin, "to": end, "window": "total", "group": "model"})
    return _shown(
        request, asked, pools=pools, total=total, from_us=from_us_, to_us=to_us, links=links, all_link=whole
    )


async def _recovered(
    request: Request[Any, Any, Any], from_us_: int, to_us: int, price: int
) -> tuple[list[Recovery], Recovery]:
    deps = gateway_of(request).deps
    engines = await deps.admin.engine_time(from_us_, to_us)
    asked = UsageAsked(from_=from_us(from_us_).isoformat(), to=from_us(to_us).isoformat(), group_by="model")
    rows = (await deps.admin.read_usage(asked, limit=MAX_PAGE)).as_json()["data"]
    charged: dict[str, SummedUsage] = {}
    for row in rows:
        pool = pool_of(row["model"] or "", deps.aliases)
        charged[pool] = charged.get(pool, SummedUsage()).plus(amounts_of(row))
    reserved = reservations(deps.directory.tenants())
    served = await deps.admin.served_time(from_us_, to_us, list(reserved))
    pools = by_pool(engines, charged, price)
    hours = (to_us - from_us_) // HOUR_US
    return pools, all_pools(pools, price, unused_us(reserved, served, hours, [pool.time for pool in pools]))


def _shown(
    request: Request[Any, Any, Any],
    asked: dict[str, str],
    *,
    problem: FormProblem | None = None,
    total: Recovery | None = None,
    **shown: Any,
) -> Response[str]:
    return page_response(
        "money/recovery.html",
        visit_of(request),
        problem=problem,
        asked=asked,
        hours_known=list(HOURS.items()),
        setting_usd=gateway_of(request).deps.config.engine_hour_usd,
        total=total,
        **shown,
    )


HANDLERS = [recovery_page]
