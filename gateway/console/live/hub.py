"""Snapshots for watched pages: one per tick and kind, however many watch, none when nobody does.

Watchers get the newest snapshot when they are ready; slow browsers miss some. Use from one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as CounterMetric

from gateway.workers.tally import ALONE, Counts
from tenants.people.person import Person
from tenants.people.roles import Role
from tenants.storage.task_stop import stop

TICK_S = 1.0
MAX_WATCHERS = 200
"""Per gateway: each is an open connection and a page rendered every second."""
OWNERS_PART = 40
"""Of these, reserved for owners."""
MOST_OF_PERSON = 20
RESUME_S = 30.0
"""A region that is away for less (tab hidden, connection lost) goes on with the rows that it had."""

T = TypeVar("T")
log = logging.getLogger("fairgate.gateway.console")


class HubFull(Exception):
    """As many watchers as allowed, in all or for this person."""


@dataclass(slots=True)
class RegionReader:
    """A region in a browser, over reconnections."""

    text_of: Callable[[Any, dict[Hashable, str]], str]
    """Keeps its rows in place."""
    began_s: float
    streams: int = 0


class Topic(Generic[T]):
    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self.number = 0
        """Of the newest snapshot; 0: there is none yet."""
        self.texts: dict[Hashable, str] = {}
        self._make = make
        self._latest: T | None = None
        self._made_s = 0.0
        self._changed = asyncio.Event()
        self._making = asyncio.Lock()
        self.wanted = 0
        self.watchers = 0
        self.task: asyncio.Task[None] | None = None
        self.is_closed = False

    @property
    def latest(self) -> T:
        """Only after `renew` or `after`."""
        return cast(T, self._latest)

    async def renew(self, younger_than_s: float) -> bool:
        """Takes a new snapshot unless the newest is younger. Returns whether it did."""
        clock = asyncio.get_running_loop().time
        async with self._making:
            if self.number and clock() - self._made_s < younger_than_s:
                return False
            self._latest = await self._make()
            self._made_s = clock()
            self.number += 1
            self.texts = {}
            self._wake()
            return True

    async def after(self, number: int) -> bool:
        """Waits for a snapshot newer than `number`. False: there will be none."""
        while self.number <= number and not self.is_closed:
            await self._changed.wait()
        return not self.is_closed

    def close(self) -> None:
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LiveHub:
    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        tick_s: float = TICK_S,
        most: int = MAX_WATCHERS,
        shared: Counts = ALONE,
    ) -> None:
        self.tick_s = tick_s
        self.is_closed = False
        self._most = most
        self._of_person: Counter[str] = Counter()
        self._shared = shared
        self._topics: dict[Hashable, Topic[Any]] = {}
        self._readers: dict[Hashable, RegionReader] = {}
        self._made = CounterMetric(
            "fairgate_console_snapshots",
            "Snapshots made for pages of the console that are watched or opened.",
            registry=registry,
        )
        self._watching = Gauge(
            "fairgate_console_watchers", "Live regions of console pages that are open.", registry=registry
        )

    @property
    def watchers(self) -> int:
        return sum(topic.watchers for topic in self._topics.values())

    def refusal(self, person: Person) -> str:
        """Why this person may not watch another page; empty: they may."""
        person_id = person.person_id
        if self._of_person[person_id] + self._shared.add(person_id, 0) >= MOST_OF_PERSON:
            return f"You have {MOST_OF_PERSON} live pages open, which is the most: close one."
        kept = 0 if person.role is Role.OWNER else OWNERS_PART
        return "Too many live pages are open." if self.is_closed or self.watchers >= self._most - kept else ""

    async def look(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """A snapshot no older than a tick. Raises what `make` raises."""
        async with self._topic(key, make) as topic:
            if await topic.renew(self.tick_s):
                self._made.inc()
            return topic.latest

    @contextlib.asynccontextmanager
    async def watch(
        self, key: Hashable, make: Callable[[], Awaitable[T]], person: Person
    ) -> AsyncIterator[Topic[T]]:
        """A topic that is renewed every tick. Raises `HubFull`."""
        if refusal := self.refusal(person):
            raise HubFull(refusal)
        async with self._topic(key, make) as topic:
            topic.watchers += 1
            self._of_person[person.person_id] += 1
            self._shared.add(person.person_id, 1)
            self._watching.set(self.watchers)
            if topic.task is None:
                topic.task = asyncio.create_task(self._tick(topic), name="console snapshots")
            try:
                yield topic
            finally:
                topic.watchers -= 1
                self._of_person -= Counter([person.person_id])  # none of a person is no entry
                self._shared.add(person.person_id, -1)
                self._watching.set(self.watchers)
                if not topic.watchers and topic.task is not None:
                    topic.task.cancel()
                    topic.task = None

    @contextlib.asynccontextmanager
    async def reading(self, name: Hashable, new: RegionReader) -> AsyncIterator[RegionReader]:
        """The reader of this name, if it was here within `RESUME_S`, or the new one."""
        reader = self._readers.setdefault(name, new)
        reader.streams += 1
        try:
            yield reader
        finally:
            reader.streams -= 1
            asyncio.get_running_loop().call_later(RESUME_S, self._forget, name, reader)

    def _forget(self, name: Hashable, reader: RegionReader) -> None:
        if not reader.streams and self._readers.get(name) is reader:
            del self._readers[name]

    async def close(self) -> None:
        """Ends all streams and accepts no more."""
        self.end_streams()
        await stop([topic.task for topic in self._topics.values() if topic.task is not None])

    def end_streams(self) -> None:
        self.is_closed = True
        for topic in self._topics.values():
            topic.close()

    @contextlib.asynccontextmanager
    async def _topic(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> AsyncIterator[Topic[T]]:
        topic = self._topics.get(key)
        if topic is None:
            topic = self._topics[key] = Topic(make)
        topic.wanted += 1
        try:
            yield topic
        finally:
            topic.wanted -= 1
            if not topic.wanted:
                del self._topics[key]

    async def _tick(self, topic: Topic[Any]) -> None:
        while True:
            try:
                # Half a tick: one that a page was opened with a moment ago will do.
                if await topic.renew(self.tick_s / 2):
                    self._made.inc()
            except Exception as error:
                log.warning("no snapshot for the console: %s: %s", type(error).__name__, error)
            await asyncio.sleep(self.tick_s)
