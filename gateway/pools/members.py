"""`Members`: follows the sources of a pool's engines, and is the one writer of its `ReplicaSet`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.client.keys import KeysRefused
from gateway.background import every
from gateway.membership import MemberAct, MembershipPlan, NamedEngine, SeenMember, plan
from gateway.pools.sources import MemberSource, SourceFailed
from gateway.upstream.base import Upstream
from gateway.upstream.local_engine import LocalEngine
from gateway.upstream.replica_set import ReplicaSet

FOLLOW_EVERY_S = 1.0
SOURCE_TIMEOUT_S = 5.0
START_WAIT_S = 5.0

log = logging.getLogger("fairgate.gateway.members")


Prepare = Callable[[Upstream], Awaitable[None]]


async def nothing(upstream: Upstream) -> None:
    """Before the gateway has started, which prepares all that are there."""


@dataclass(slots=True)
class _Seat:
    engine: LocalEngine
    place: NamedEngine
    heard_s: float
    """When it was heard last, ran something last, and was named last."""
    ran_s: float
    named_s: float
    is_up: bool = False


class Members:
    """Use from one event loop."""

    def __init__(
        self,
        replicas: ReplicaSet,
        sources: Sequence[MemberSource],
        make: Callable[[NamedEngine], LocalEngine],
        clock: Callable[[], float],
    ) -> None:
        """`make` raises `KeysRefused`."""
        self.replicas = replicas
        self._sources = sources
        self._make = make
        self._clock = clock
        self._said: dict[str, Sequence[NamedEngine]] = {}
        """By source, of one that fails what it said last."""
        self._failed: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._seats: dict[str, _Seat] = {}

    @property
    def is_complete(self) -> bool:
        """Every source was heard once: who is no member has left."""
        return len(self._said) == len(self._sources)

    def missing(self) -> list[str]:
        """Names of those that are said to be there and do not serve."""
        quiet = [name for name, seat in self._seats.items() if not seat.engine.is_up]
        return sorted({*quiet, *(self._refused.keys() - self._seats.keys())})

    def describe(self) -> list[dict[str, Any]]:
        """Of each engine name, address, source, state and why it does not serve; the sources that fail."""
        rows = [
            {"name": name, "address": seat.place.address, "source": seat.place.source}
            | self._state(name, seat)
            for name, seat in sorted(self._seats.items())
        ]
        for name in sorted(self._refused.keys() - self._seats.keys()):
            rows.append(
                {"name": name, "address": "", "source": "", "state": "refused", "why": self._refused[name]}
            )
        for source, why in self._failed.items():
            rows.append({"name": "", "address": "", "source": source, "state": "failed", "why": why})
        return rows

    async def look(self, prepare: Prepare = nothing) -> None:
        """Asks the sources once, and acts on it. `prepare` is called with an engine that has joined, before
        it is connected to."""
        await asyncio.gather(*map(self._ask, self._sources))
        now_s = self._clock()
        said = [word for source in self._sources for word in self._said.get(source.name, ())]
        for seat in self._seats.values():
            seat.engine.check()
            self._note(seat, now_s)
        named = {word.name for word in said}
        for name in named & self._seats.keys():
            self._seats[name].named_s = now_s
        members = {name: _member(name, seat, now_s) for name, seat in self._seats.items()}
        decided = plan(said, members)
        refused = dict(decided.refused)
        for name, act in decided.acts.items():
            if act in (MemberAct.REMOVE, MemberAct.REPLACE):
                await self._remove(name, act)
            if act in (MemberAct.JOIN, MemberAct.REPLACE):
                await self._join(decided.places[name], now_s, refused, prepare)
            elif act is not MemberAct.REMOVE:
                self._stay(name, act, decided)
        for name, line in refused.items():
            if self._refused.get(name) != line:
                log.warning("engine %s: %s", name, line)
        self._refused = refused

    async def ready(self, timeout_s: float) -> None:
        """Waits for the first one that serves, for `START_WAIT_S` at most; the others join when they come."""
        up = asyncio.Event()
        self.replicas.each(lambda upstream: upstream.watch(up.set))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, START_WAIT_S)):
                while not any(upstream.is_up for upstream in self.replicas):
                    up.clear()
                    await up.wait()
        if missing := self.missing():
            log.warning("engines that do not serve yet: %s", ", ".join(missing))

    async def run(self, prepare: Prepare) -> None:
        """Follows the sources until it is cancelled."""
        look = partial(self.look, prepare)
        await every(FOLLOW_EVERY_S, look, log, "the engines were not followed; it goes on")

    async def close(self) -> None:
        await asyncio.gather(*(seat.engine.close() for seat in self._seats.values()))

    async def _ask(self, source: MemberSource) -> None:
        try:
            async with asyncio.timeout(SOURCE_TIMEOUT_S):
                self._said[source.name] = await source.said()
        except (SourceFailed, TimeoutError) as error:
            why = str(error) or f"no answer within {SOURCE_TIMEOUT_S:g} s"
            if source.name not in self._failed:
                log.warning("%s: %s; engines stay as they were", source.name, why)
            self._failed[source.name] = why
        else:
            if self._failed.pop(source.name, None):
                log.info("%s answers again", source.name)

    async def _join(
        self, place: NamedEngine, now_s: float, refused: dict[str, str], prepare: Prepare
    ) -> None:
        try:
            engine = self._make(place)
        except KeysRefused as error:
            refused[place.name] = str(error)
            return
        self._seats[place.name] = _Seat(engine, place, now_s, now_s, now_s)
        self.replicas.add(engine)
        await prepare(engine)
        engine.open()
        log.info("engine %s joins: %s (%s)", place.name, place.address, place.source)

    async def _remove(self, name: str, act: MemberAct) -> None:
        seat = self._seats.pop(name)
        what = "has left" if act is MemberAct.REMOVE else "moves from"
        log.info("engine %s %s %s", name, what, seat.place.address)
        self.replicas.remove(seat.engine)
        await seat.engine.close()

    def _stay(self, name: str, act: MemberAct, decided: MembershipPlan) -> None:
        seat, is_leaving = self._seats[name], act is MemberAct.LEAVE
        seat.place = decided.places.get(name, seat.place)
        if is_leaving != seat.engine.is_leaving:
            what = "is named by no source any more: it gets no turns" if is_leaving else "is named again"
            log.warning("engine %s %s", name, what)
            seat.engine.set_leaving(is_leaving)

    def _note(self, seat: _Seat, now_s: float) -> None:
        # As of the last look, too: a connection that came and broke between two was heard.
        if seat.engine.is_up or seat.is_up:
            seat.heard_s = now_s
        if seat.engine.runs:
            seat.ran_s = now_s
        seat.is_up = seat.engine.is_up

    def _state(self, name: str, seat: _Seat) -> dict[str, str]:
        engine = seat.engine
        why = self._refused.get(name, "")
        if not engine.is_up:
            refusal = str(engine.describe()["refusal"])
            quiet_s = self._clock() - seat.heard_s
            why = refusal or why or f"nothing is heard from it for {quiet_s:.0f} s"
            return {"state": "refused" if refusal else "away", "why": why}
        if engine.is_leaving:
            return {"state": "leaving", "why": "no source names it any more"}
        return {"state": "drained" if engine.is_drained else "serving", "why": why}


def _member(name: str, seat: _Seat, now_s: float) -> SeenMember:
    return SeenMember(
        name,
        seat.place.address,
        0.0 if seat.is_up else max(1e-9, now_s - seat.heard_s),
        now_s - seat.ran_s,
        now_s - seat.named_s,
    )
