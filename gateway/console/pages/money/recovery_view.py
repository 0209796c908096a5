"""Charges against engine cost: engine time as money, and the break-even price. Pure.

An engine costs the same every hour. Its time is divided into four exact parts: away, idle, recomputing tokens
lost to preemption, and working. Part of the idle time was reserved for tenants that did not use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.console.pages.money.amounts import SummedUsage
from tenants.admin.lists.engine_time import EngineTime, ServedTime

HOUR_US = 3_600_000_000
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
        """Charge minus cost."""
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
