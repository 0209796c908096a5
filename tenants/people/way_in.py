"""The way in: every log-in passes here, and here alone.

A password is checked in a bounded gate (`hashing_gate.py`), slowed by name and by address (`throttle.py`). An
unknown name, a suspended person and a wrong password get the same answer for the same work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tenants.errors import LogInRefused, TooManyLogIns
from tenants.people.hashing_gate import AT_ONCE, HashingGate
from tenants.people.passwords import MAX_CHARS, NO_PASSWORD, check_password, hash_password, verify_password
from tenants.people.person import Person, folded
from tenants.people.sessions import OpenedSession
from tenants.people.store import People
from tenants.people.throttle import BEGIN, NOT_JUDGED, SUCCEEDED, LogInThrottle

MAX_TOLD_CHARS = 120


@dataclass(frozen=True, slots=True)
class LogIn:
    """A log-in, or a password that was asked for again."""

    name: str
    """As typed, folded."""
    address: str
    refused: str = ""
    """`password`: wrong; `slowed`: too many attempts; empty: it succeeded."""


class KeptThrottle(Protocol):
    """Keeps the throttle of several processes; each has its own for when it does not answer."""

    async def ask(self, name: str, *words: str) -> float | None:
        """Seconds to wait; None: no answer."""

    def tell(self, name: str, *words: str) -> None: ...


class WayIn:
    """Log-ins of one gateway. `close` it when done."""

    def __init__(
        self,
        people: People,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[LogIn], None] = lambda _: None,
        kept: KeptThrottle | None = None,
        hashes: int = AT_ONCE,
    ) -> None:
        """`tell` is called for every successful log-in, and every refused password. `kept`: the throttle of
        several processes; `hashes` run at once."""
        self.gate = HashingGate(hashes)
        self._kept = kept
        self.throttle = LogInThrottle()
        self._people = people
        self._tell = tell
        self._clock = clock

    async def log_in(self, name: str, password: str, *, address: str, user_agent: str = "") -> OpenedSession:
        """Raises `LogInRefused`, `TooManyLogIns`, `DatabaseUnavailable`."""
        # Bounded before it is folded: some letters fold to several, and a body is longer than a name.
        typed = folded(name[:MAX_CHARS])
        with self._told(typed, address):
            person = await self._check(typed, name, password, address)
            opened = await self._people.open_session(person, address=address, user_agent=user_agent)
        self._tell(LogIn(person.name, address))
        return opened

    async def confirm(self, person: Person, password: str, *, address: str) -> None:
        """Raises as `log_in`. Throttled separately: strangers who try a name do not slow one who is in."""
        with self._told(person.name, address):
            await self._check(f"again {person.person_id}", person.name, password, address)

    async def new_hash(self, name: str, password: str) -> str:
        """Raises `Invalid` for a password that is not accepted, and `TooManyLogIns`."""
        check_password(password, name)
        return await self.gate.run(lambda: hash_password(password))

    def close(self) -> None:
        self.gate.close()

    @contextmanager
    def _told(self, name: str, address: str) -> Iterator[None]:
        try:
            yield
        except (LogInRefused, TooManyLogIns) as error:
            why = "password" if isinstance(error, LogInRefused) else "slowed"
            self._tell(LogIn(name[:MAX_TOLD_CHARS], address, why))
            raise

    async def _check(self, slowed: str, name: str, password: str, address: str) -> Person:
        kept, wait_s = self._kept, None
        if kept is not None:
            wait_s = await kept.ask(BEGIN, slowed, address)
        if wait_s is None:
            kept, wait_s = None, self.throttle.begin(slowed, address, self._clock())
        if wait_s > 0:
            raise TooManyLogIns(wait_s)
        try:
            credentials = await self._people.find_for_login(name)
            stored = (
                credentials.password_hash if credentials is not None and len(password) <= MAX_CHARS else ""
            )
            checked = stored or NO_PASSWORD
            is_right = await self.gate.run(lambda: verify_password(checked, password[:MAX_CHARS]))
        except BaseException:  # also where the caller left
            if kept is None:
                self.throttle.not_judged(slowed, address)
            else:
                kept.tell(NOT_JUDGED, slowed, address)
            raise
        if credentials is None or not stored or not is_right or credentials.person.status != "active":
            raise LogInRefused
        if kept is None:
            self.throttle.succeeded(slowed, address)
        else:
            kept.tell(SUCCEEDED, slowed, address)
        return credentials.person
