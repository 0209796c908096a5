"""Admin acts on brakes: what a tier may hold of every engine, until an instant.

At most one a tier. Its fields are rows of the settings, so that each fits. Whichever gateway first sees a
brake's time over removes it and writes the audit row, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from tenants.admin.audit import Actor
from tenants.admin.commands import BRAKED_TIERS, BrakeEnd, BrakeSet
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.errors import Invalid, NotFound
from tenants.instants import from_us
from tenants.nouns import checks
from tenants.storage import tables
from tenants.types import Tier

MAX_BRAKE_S = 86_400
BY_TIME = Actor("system", "brake over")
"""The actor that ends expired brakes."""
_FIELDS = ("share", "until_us", "by", "reason")


@dataclass(frozen=True, slots=True)
class Brake:
    """A tier's share of places, KV cache and step tokens, until an instant."""

    tier: Tier
    share: float
    until_us: int
    by: str
    reason: str = ""

    def is_over(self, now_us: int) -> bool:
        return now_us >= self.until_us

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.tier.value,
            "share": self.share,
            "until": from_us(self.until_us).isoformat(),
            "by": self.by,
            "reason": self.reason,
        }


class BrakeActs(AdminActs):
    async def set(self, actor: Actor | str, wanted: BrakeSet, *, if_match: IfMatch = None) -> Brake:
        """Sets a tier's brake for all gateways of the database, in place of the one it has."""
        tier, share, for_s = _tier(wanted.tier), _share(wanted.share), _for_s(wanted.for_s)
        reason = checks.reason(wanted.reason) if wanted.reason else ""
        by = actor if isinstance(actor, str) else actor.name
        await self.end_over()

        def change(connection: Connection, now_us: int) -> Change[Brake]:
            before = _take(connection, tier)
            after = Brake(tier, share, now_us + round(for_s * 1e6), by, reason)
            rows = [
                {"name": name, "value": str(getattr(after, field))} for field, name in _names(tier).items()
            ]
            connection.execute(insert(tables.settings), rows)
            was = None if before is None else before.as_json()
            return Change(after, _target(tier), None, was, after.as_json())

        return await self._transactions.act(actor, "brake.set", change, if_match)

    async def end(self, actor: Actor | str, wanted: BrakeEnd, *, if_match: IfMatch = None) -> Brake:
        """Ends a tier's brake before its time, and returns it. Raises `NotFound`."""
        tier = _tier(wanted.tier)

        def change(connection: Connection, now_us: int) -> Change[Brake]:
            before = _take(connection, tier)
            if before is None or before.is_over(now_us):
                raise NotFound("brake", tier.value)
            return Change(before, _target(tier), None, before.as_json())

        return await self._transactions.act(actor, "brake.end", change, if_match)

    async def end_over(self) -> None:
        """Ends the brakes whose time is over, each once, however many gateways see it."""
        for brake in await self.stored():
            if brake.is_over(self._transactions.now_us()):
                with suppress(NotFound):
                    await self._transactions.act(BY_TIME, "brake.end", _end_over(brake.tier))

    async def all(self) -> list[Brake]:
        now_us = self._transactions.now_us()
        return [brake for brake in await self.stored() if not brake.is_over(now_us)]

    async def stored(self) -> list[Brake]:
        """All brakes, also those whose time is over and whose end is not written yet."""
        return await self._transactions.read(stored_brakes)


def stored_brakes(connection: Connection) -> list[Brake]:
    return [brake for tier in BRAKED_TIERS if (brake := _find(connection, tier))]


def _end_over(tier: Tier) -> Callable[[Connection, int], Change[None]]:
    def change(connection: Connection, now_us: int) -> Change[None]:
        before = _take(connection, tier)
        if before is None or not before.is_over(now_us):
            raise NotFound("brake", tier.value)
        return Change(None, _target(tier), None, before.as_json())

    return change


def _find(connection: Connection, tier: Tier) -> Brake | None:
    columns = tables.settings.c
    is_of_tier = columns.name.in_(_names(tier).values())
    rows = connection.execute(select(columns.name, columns.value).where(is_of_tier))
    values = {row.name.rpartition(".")[2]: row.value for row in rows}
    if not values:
        return None
    return Brake(tier, float(values["share"]), int(values["until_us"]), values["by"], values["reason"])


def _take(connection: Connection, tier: Tier) -> Brake | None:
    brake = _find(connection, tier)
    connection.execute(delete(tables.settings).where(tables.settings.c.name.in_(_names(tier).values())))
    return brake


def _target(tier: Tier) -> str:
    return f"brake.{tier.value}"


def _names(tier: Tier) -> dict[str, str]:
    return {field: f"{_target(tier)}.{field}" for field in _FIELDS}


def _tier(value: str) -> Tier:
    tier = checks.choice("tier", Tier, value)
    if tier not in BRAKED_TIERS:
        raise Invalid(
            "tier",
            f"a brake holds {' or '.join(each.value for each in BRAKED_TIERS)}; {tier.value} is never braked:"
            " bound single tenants there with `fairgate limit set`",
        )
    return tier


def _share(value: float) -> float:
    checks.finite("share", value, "a number above 0 and at most 1, such as 0.1 for a tenth")
    if not 0 < value <= 1:
        raise Invalid(
            "share",
            f"is {value:g}, and must be above 0 and at most 1, such as 0.1 for a tenth; one request of a"
            " braked tier may always run",
        )
    return float(value)


def _for_s(value: float) -> float:
    hours = MAX_BRAKE_S // 3600
    checks.finite("for_s", value, "a finite number of seconds")
    if not 1 <= value <= MAX_BRAKE_S:
        raise Invalid(
            "for_s", f"must be 1 to {MAX_BRAKE_S} seconds ({hours} hours): set it again where it has to last"
        )
    return float(value)
