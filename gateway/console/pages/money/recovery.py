"""The page of recovery: what tenants were charged against what the engines cost.

An engine costs the same every hour. Its time is divided into four exact parts: away, idle, recomputing tokens
lost to preemption, and working. Part of the idle time was reserved for tenants that did not use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from litestar import Response

from gateway.console.access import page, visit_of
from gateway.console.form_errors import FormProblem
from gateway.console.pages.filters import FILTER_ERRORS, Filters, asked_of
from gateway.console.pages.money.amounts import SummedUsage, amounts_of
from gateway.console.pages.money.usage import PATH as USAGE
from gateway.console.rendering import page_response
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.engine_time import MOST_RESERVED, EngineTime, ServedTime
from tenants.counts.minute_store import HOUR_US
from tenants.errors import Invalid
from tenants.instants import from_us
from tenants.nouns.alias import Alias, Chain
from tenants.nouns.tenant import Tenant
from tenants.people.roles import Act
from tenants.resources.records.usage import UsageAsked, usage_page

PATH = "/console/usage/recovery"
HOURS = {"24": "24 hours", "168": "7 days", "312": "13 days"}
"""Minutes of engines are kept for 14 days."""
NANO = 1_000_000_000
MOST_USD = 1_000_000

MILLION = 1_000_000


@dataclass(frozen=True)
class PoolTime:
    """Time of all replicas of a pool, in microseconds; the four parts add up to `seen_us`."""

    pool: str
    replicas: int
    seen_us: int
    away_us: int
    idle_us: int
    again_us: int
    """Recomputing: by its share of all tokens of the steps."""
    work_us: int


@dataclass(frozen=True)
class Recovery:
    """Time, cost and charge of a pool or of all. Money in nano-dollars."""

    time: PoolTime
    hour_nanousd: int
    charged: SummedUsage
    reserved_us: int = 0
    """Idle time that was reserved and not used; only for all pools together."""

    def money_of(self, time_us: int) -> int:
        """Rounded down."""
        return time_us * self.hour_nanousd // HOUR_US

    @property
    def cost(self) -> int:
        return self.money_of(self.time.seen_us)

    @property
    def away(self) -> int:
        return self.money_of(self.time.away_us)

    @property
    def idle(self) -> int:
        return self.money_of(self.time.idle_us)

    @property
    def reserved(self) -> int:
        return self.money_of(self.reserved_us)

    @property
    def again(self) -> int:
        return self.money_of(self.time.again_us)

    @property
    def work(self) -> int:
        """The rest, so that the parts add up to the cost."""
        return self.cost - self.away - self.idle - self.again

    @property
    def tokens(self) -> int:
        return self.charged.input_tokens + self.charged.output_tokens

    @property
    def difference(self) -> int:
        return self.charged.net_nanousd - self.cost

    @property
    def share(self) -> float | None:
        """Charge over cost; None: no cost."""
        return self.charged.net_nanousd / self.cost if self.cost else None

    @property
    def charged_per_million(self) -> int | None:
        """Per million tokens; None: there were none."""
        return _per_million(self.charged.net_nanousd, self.tokens)

    @property
    def break_even(self) -> int | None:
        """The price of a million tokens at which charge and cost are equal."""
        return _per_million(self.cost, self.tokens)

    @property
    def break_even_busy(self) -> int | None:
        """Break-even if engines had only worked: no price can go below this."""
        return _per_million(self.work, self.tokens)


def _per_million(nanousd: int, tokens: int) -> int | None:
    return None if not tokens else round(nanousd * MILLION / tokens)


def pool_time(pool: str, replicas: Sequence[EngineTime]) -> PoolTime:
    seen_us = sum(replica.counts.seen_us for replica in replicas)
    # Gateways look once a second: never more up than seen, and never more idle than up.
    up_us = min(seen_us, sum(replica.counts.up_us for replica in replicas))
    idle_us = min(up_us, sum(replica.counts.idle_us for replica in replicas))
    again = sum(replica.counts.recomputed_tokens for replica in replicas)
    tokens = again + sum(
        replica.counts.computed_tokens + replica.counts.emitted_tokens for replica in replicas
    )
    busy_us = up_us - idle_us
    again_us = busy_us * again // tokens if tokens else 0
    return PoolTime(pool, len(replicas), seen_us, seen_us - up_us, idle_us, again_us, busy_us - again_us)


def by_pool(
    engines: Iterable[EngineTime], charged: Mapping[str, SummedUsage], hour_nanousd: int
) -> list[Recovery]:
    replicas: dict[str, list[EngineTime]] = {}
    for engine in engines:
        replicas.setdefault(engine.pool, []).append(engine)
    return [
        Recovery(pool_time(pool, replicas.get(pool, [])), hour_nanousd, charged.get(pool, SummedUsage()))
        for pool in sorted({*replicas, *charged})
    ]


def all_pools(pools: Sequence[Recovery], hour_nanousd: int, reserved_us: int) -> Recovery:
    total = SummedUsage()
    for pool in pools:
        total = total.plus(pool.charged)
    times = [pool.time for pool in pools]
    names = ("replicas", "seen_us", "away_us", "idle_us", "again_us", "work_us")
    sums = [sum(getattr(time, name) for time in times) for name in names]
    return Recovery(PoolTime("all", *sums), hour_nanousd, total, min(reserved_us, sums[3]))


def unused_us(
    reserved: Mapping[str, float], served: ServedTime, hours: int, times: Sequence[PoolTime]
) -> int:
    """Engine time reserved and not used: per hour the tokens below the reservation, at the speed of working
    engines; at most the idle time. `reserved`: cost tokens a second."""
    unused_tokens = 0.0
    for tenant_id, rate in reserved.items():
        most = rate * 3600
        unused_tokens += most * hours - sum(min(most, tokens) for tokens in served.by_hour.get(tenant_id, ()))
    idle_us = sum(time.idle_us for time in times)
    busy_us = sum(time.again_us + time.work_us for time in times)
    if unused_tokens <= 0 or not served.all_tokens or not busy_us:
        return idle_us if unused_tokens > 0 else 0
    return min(idle_us, round(unused_tokens * busy_us / served.all_tokens))


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
async def recovery_page(request: Request) -> Response[str]:
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
        return _shown(request, asked, problem=Filters(PATH, asked).problem(error))
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
    request: Request, from_us_: int, to_us: int, price: int
) -> tuple[list[Recovery], Recovery]:
    gateway = gateway_of(request)
    deps, aliases = gateway.deps, gateway.models.catalogue.aliases
    engines = await deps.admin.engine_time.by_replica(from_us_, to_us)
    begin, end = (from_us(instant_us).isoformat() for instant_us in (from_us_, to_us))
    asked = UsageAsked(since=begin, until=end, group_by="model")
    rows = (await usage_page(deps.admin, asked, limit=MAX_PAGE)).as_json()["data"]
    charged: dict[str, SummedUsage] = {}
    for row in rows:
        pool = pool_of(row["model"] or "", aliases)
        charged[pool] = charged.get(pool, SummedUsage()).plus(amounts_of(row))
    reserved = reservations(deps.directory.tenants())
    served = await deps.admin.engine_time.served(from_us_, to_us, list(reserved))
    pools = by_pool(engines, charged, price)
    hours = (to_us - from_us_) // HOUR_US
    return pools, all_pools(pools, price, unused_us(reserved, served, hours, [pool.time for pool in pools]))


def _shown(
    request: Request,
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
