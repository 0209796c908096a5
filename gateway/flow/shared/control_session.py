"""One gateway's part in the control loop of a shared queue: who decides, and what is in force.

The gateway that holds a lock in Redis, renewed at each look, decides. At each look every gateway sends what
it sees; the holder decides by all their traffic and keeps the result beside the lock (`control.lua`), under a
term that grows with every change of holder: decisions of earlier holders are not kept. The others follow what
is kept, so a newly elected one has the state that keeps the loop from swinging.

Pure: a look is a generator of words to send, and is given the answers (None: there was none). Times of other
gateways come as ages by the clock of Redis.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gateway.flow.control_rules import Control, ControlState, Move, Observation
from gateway.flow.knobs import QUEUE_KNOBS
from tenants.quota import scripts

LOCK_S = 6.0
"""Three observations: after this the holder is taken for dead or hung."""
FRESH_S = 6.0
"""Validity of an observation."""
IN_FORCE_S = 30.0
"""Validity of a decision after its decider's last message; then knobs rest."""

Decide = Callable[[Observation, float], list[Move]]
"""(everyone's observation, now): the moves."""


def control_script() -> str:
    text = (Path(__file__).parent / "control.lua").read_text(encoding="utf-8")
    return f"{scripts.server()}\n{text}"


def control_keys(prefix: str, pool: str) -> list[str]:
    """The lock, what gateways see, and the pool's own scalars, all in its slot of a Redis Cluster."""
    base = f"{prefix}:flow:{{{pool}}}"
    return [f"{base}:control", f"{base}:seen", f"{base}:meta"]


@dataclass(frozen=True, slots=True)
class ControlWords:
    gateway_id: str
    term: int
    """0: it does not decide."""
    seen: bytes
    decided: bytes = b""
    queue_knobs: bytes = b""
    leaves: bool = False

    def arguments(self, now_us: int = 0) -> list[bytes | str | int]:
        """Of the script; `now_us` replaces the server's clock in tests."""
        spans_us = [round(seconds * 1e6) for seconds in (LOCK_S, FRESH_S, IN_FORCE_S)]
        leaves = "leaves" if self.leaves else ""
        return [
            now_us, self.gateway_id, self.term, *spans_us, self.seen, self.decided, self.queue_knobs, leaves
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    holder: str
    term: int
    is_elected: bool
    """Since this message."""
    is_stored: bool
    decided: bytes
    """The valid decision; empty: none yet."""
    decided_ago_s: float
    before: str
    """The previous holder of the lock."""
    before_ago_s: float
    """Age of its last message."""
    seen: tuple[bytes, ...]
    """Of all gateways; only for the holder."""

    @classmethod
    def of(cls, said: Sequence[bytes]) -> ControlAnswer:
        """Raises ValueError."""
        now_us, holder, term, elected, stored, decided, decided_us, before, before_us, *seen = said
        return cls(
            holder.decode(),
            int(term),
            bool(int(elected)),
            bool(int(stored)),
            decided,
            (int(now_us) - int(decided_us)) / 1e6,
            before.decode(),
            (int(now_us) - int(before_us)) / 1e6,
            tuple(seen),
        )


ControlLook = Generator[ControlWords, ControlAnswer | None, list[Move]]


class ControlSession:
    """Of one gateway and pool. One writer: the loop that observes."""

    def __init__(
        self, control: Control, gateway_id: str, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        """`tell` is called with messages for operators."""
        self.control = control
        self.holder = ""
        """Who decides, as of the last answer; empty: unknown."""
        self.term = 0
        self._gateway_id = gateway_id
        self._tell = tell
        self._heard_s: float | None = None
        self._is_silent = False
        self._known_s = -float("inf")
        """When what stands here was in force in the pool last."""

    @property
    def is_holder(self) -> bool:
        return self.holder == self._gateway_id

    def look(self, seen: Observation, decide: Decide, now_s: float, *, alone: bool = False) -> ControlLook:
        """One look: tells what this gateway sees, follows the one that decides, or decides. Returns the moves
        that it decided and that are in force. `alone`: without an answer this gateway decides for itself."""
        answer = yield self.words(seen, now_s)
        if answer is None:
            return self._unanswered(seen, decide, now_s, alone=alone)
        self._heard_s, self._is_silent = now_s, False
        held = self.is_holder
        self._follow(answer, now_s, held=held)
        self._known_s = max(self._known_s, now_s if self.is_holder else now_s - answer.decided_ago_s)
        if not self.is_holder:
            return []
        before = self.control.state(now_s)
        moves = decide(together(_observations(answer.seen) or [seen]), now_s)
        if not moves and not answer.is_elected:
            return []
        answer = yield self.words(seen, now_s)
        if answer is None or not answer.is_stored:
            self.control.take_back(moves, before, now_s)
            if answer is not None:
                self._follow(answer, now_s, held=True)
            return []
        return moves

    def leaves(self) -> ControlWords:
        """The last message: another gateway may decide immediately."""
        return ControlWords(self._gateway_id, self._own_term, b"", leaves=True)

    def words(self, seen: Observation, now_s: float) -> ControlWords:
        """This gateway's observation and, if it is the holder, its decision."""
        packed = msgspec.json.encode(seen)
        if not self.is_holder:
            return ControlWords(self._gateway_id, 0, packed)
        in_force = self.control.in_force
        knobs = {knob.value: in_force[knob] for knob in QUEUE_KNOBS if knob in in_force}
        decided = msgspec.json.encode(self.control.state(now_s))
        return ControlWords(self._gateway_id, self.term, packed, decided, msgspec.msgpack.encode(knobs))

    @property
    def _own_term(self) -> int:
        return self.term if self.is_holder else 0

    def _follow(self, answer: ControlAnswer, now_s: float, *, held: bool) -> None:
        earlier, self.holder, self.term = self.holder, answer.holder, answer.term
        if self.is_holder and held and not answer.is_elected:
            return  # what is kept is our own
        state = _state(answer.decided) if answer.decided_ago_s <= IN_FORCE_S else None
        if state is not None:
            self.control.adopt(state, now_s - answer.decided_ago_s)
        elif now_s - self._known_s > IN_FORCE_S:
            self.control.let_go(f"no gateway has decided for {IN_FORCE_S:g} s", now_s)
        if answer.is_elected:
            self._tell(_why_elected(answer))
        elif held:
            self._tell(f"{self.holder} has decided since this gateway was silent: this one follows it")
        elif earlier != self.holder:
            self._tell(f"{self.holder} decides (term {self.term}), and this gateway follows it")

    def _unanswered(self, seen: Observation, decide: Decide, now_s: float, *, alone: bool) -> list[Move]:
        self.holder = ""
        if alone:
            self._say_silent("Redis does not answer: this gateway decides for itself")
            self._known_s = now_s
            return decide(seen, now_s)
        if self._heard_s is not None and now_s - self._heard_s > IN_FORCE_S:
            why = f"Redis has not answered for {IN_FORCE_S:g} s"
            self._say_silent(f"{why}: all knobs rest")
            return self.control.let_go(why, now_s)
        return []

    def _say_silent(self, line: str) -> None:
        if not self._is_silent:
            self._is_silent = True
            self._tell(line)


def together(seen: Sequence[Observation]) -> Observation:
    """Combines a pool's observations; shares weigh by arrivals. Raises ValueError for none."""
    if not seen:
        raise ValueError("no gateway has said what it sees")
    if len(seen) == 1:
        return seen[0]
    judging = [observation for observation in seen if observation.attainment is not None]

    def mean(name: str, of: Sequence[Observation] = seen) -> float:
        weights = [observation.arrivals_per_s for observation in of]
        if not sum(weights):
            weights = [1.0] * len(of)
        values: list[float] = [getattr(observation, name) for observation in of]
        return sum(map(float.__mul__, map(float, values), weights)) / sum(weights)

    return Observation(
        arrivals_per_s=sum(observation.arrivals_per_s for observation in seen),
        length_spread=mean("length_spread"),
        kv_share=max(observation.kv_share for observation in seen),
        prefix_hit_share=mean("prefix_hit_share"),
        step_s=max(observation.step_s for observation in seen),
        attainment=mean("attainment", judging) if judging else None,
        queued=sum(observation.queued for observation in seen),
        evictions=max(observation.evictions for observation in seen),
        expected_late=mean("expected_late"),
        in_good_time=mean("in_good_time"),
        spare_share=min(observation.spare_share for observation in seen),
        higher_waits=any(observation.higher_waits for observation in seen),
    )


def _why_elected(answer: ControlAnswer) -> str:
    now = f"this gateway decides (term {answer.term})"
    if not answer.before:
        return f"{now}: it is the first"
    silent = f"{answer.before}, which decided, has said nothing for {answer.before_ago_s:.1f} s"
    if answer.decided_ago_s > IN_FORCE_S:
        return f"{silent}: {now}, and begins at rest"
    return f"{silent}: {now}, and goes on from the knobs in force"


def _observations(packed: Sequence[bytes]) -> list[Observation]:
    """Skips observations of other versions that this one cannot read."""
    seen = []
    for text in packed:
        with suppress(msgspec.DecodeError):
            seen.append(msgspec.json.decode(text, type=Observation))
    return seen


def _state(packed: bytes) -> ControlState | None:
    try:
        return msgspec.json.decode(packed, type=ControlState)
    except msgspec.DecodeError:
        return None
