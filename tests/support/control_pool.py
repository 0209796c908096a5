"""The control loops of several gateways of one pool over a real Redis, on a virtual clock."""

from __future__ import annotations

from typing import Any

import redis

from gateway.flow.control_rules import Control, Move, Observation
from gateway.flow.shared.control_session import (
    ControlAnswer,
    ControlSession,
    ControlWords,
    control_keys,
    control_script,
)
from tests.support.shared_pool import PREFIX


def observed(
    kv: float = 0.3,
    spread: float = 0.5,
    hits: float = 0.0,
    attainment: float | None = None,
    queued: int = 10,
    late: float = 0.0,
    good: float = 0.0,
    arrivals: float = 10.0,
) -> Observation:
    """Quiet traffic, but for what is said."""
    return Observation(arrivals, spread, kv, hits, 0.02, attainment, queued, 0, late, good)


class ControlRoom:
    """The shared half: the lock, what is in force, and the clock that all go by."""

    def __init__(self, client: redis.Redis, name: str = "pool") -> None:
        self.client: Any = client
        self.keys = control_keys(PREFIX, name)
        self.script: Any = client.register_script(control_script())
        self.words: list[ControlWords] = []
        self.is_away = False

    def say(self, words: ControlWords, server_s: float) -> ControlAnswer | None:
        """One round trip."""
        self.words.append(words)
        if self.is_away:
            return None
        return ControlAnswer.of(self.script(keys=self.keys, args=words.arguments(round(server_s * 1e6))))


class LoopGateway:
    """One gateway's half. Its own clock is `clock_s` ahead of Redis's."""

    def __init__(self, room: ControlRoom, name: str, control: Control, clock_s: float = 0.0) -> None:
        self.room = room
        self.control = control
        self.clock_s = clock_s
        self.lines: list[str] = []
        self.session = ControlSession(control, name, self.lines.append)

    def look(
        self, server_s: float, seen: Observation | None = None, *, alone: bool = False, answers: int = 99
    ) -> list[Move]:
        """One look; after so many answers there are no more."""
        look = self.session.look(seen or observed(), self.control.look, server_s + self.clock_s, alone=alone)
        answer: ControlAnswer | None = None
        try:
            words = next(look)
            while True:
                answer = self.room.say(words, server_s)
                words = look.send(answer if answers > 0 else None)
                answers -= 1
        except StopIteration as ended:
            return list(ended.value)
