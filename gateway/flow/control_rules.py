"""Rules of the control loop: from observed traffic to moves of the scheduling knobs.

An observation every few seconds (`Observation`) gives at most one move of each knob, within its bounds, with
its reason. The rules, by their objective (attainment first, goodput second):

1. KV nearly full: smaller batches, and less is sent ahead, so that no answer is evicted half-way.
2. Lengths widely spread: faster ageing, so that long answers do not starve the requests behind them.
3. Prefix hits high: more concurrent sequences, since what is cached need not be computed.
4. Spare capacity: token buckets of tier batch refill faster than was promised, up to their ceilings. What is
   lent so goes back at once and whole when anything of a higher tier waits or targets are about to be missed:
   it protects others, so it waits for no minute, and its turns keep no other knob from turning.

When none holds, the knobs return to the operator's settings. Targets missed while requests wait are for
admission, as what is admitted then is late in any case; where many are expected to miss (overload) those are
refused, or all would miss. Where most is served well within its target the forecast's p90 counts half. Every
rule has two thresholds (hysteresis), and at most one knob turns back in a minute, admission aside
(`ADMISSION_REVERSAL_S`).

An operator's brake bounds a knob from above while it lasts.

Modes: off does nothing; advice reports moves; acting calls the setters. Where gateways share a queue one of
them decides (`shared/control_session.py`), handing on `Control.state` (`Control.adopt`). Pure: the caller
applies the moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway.flow.deadline_check import FIRM, LENIENT
from gateway.flow.knobs import DEFAULT_BOUNDS, Bounds, Knob

MAX_MOVES = 1_000
HANDED_ON_MOVES = 16
"""As many as one observation of all knobs can make, and some."""
REVERSAL_S = 60.0
"""A knob reverses no sooner, nor sooner after another one did."""
ADMISSION_REVERSAL_S = 15.0
"""Admission reverses no sooner, whatever others did: it binds newcomers alone, and bursts are short."""
BURSTS_S = 300.0
"""After an overload another one is likely for this long."""
LOWEST, HIGHEST = -float("inf"), float("inf")
TARGET = 0.9


class ControlMode(StrEnum):
    OFF = "off"
    ADVICE = "advice"
    ACTING = "acting"


@dataclass(frozen=True, slots=True)
class Observation:
    """The traffic of the last few seconds. Shares are 0 to 1."""

    arrivals_per_s: float
    length_spread: float
    """Standard deviation of the logarithm of the answers' lengths."""
    kv_share: float
    """Of the KV cache, referenced by sequences."""
    prefix_hit_share: float
    """Of the prompt tokens."""
    step_s: float
    attainment: float | None
    """Share of the requests that met their targets; None: none has one."""
    queued: int
    evictions: int = 0
    """For lack of memory."""
    expected_late: float = 0.0
    """Share of the last requests, refused or not, that were expected to miss their target."""
    in_good_time: float = 0.0
    """Of those that ended, those that took at most half of each target."""
    spare_share: float = 0.0
    """Of the engines' capacity, places and memory, idle."""
    higher_waits: bool = False
    """A request of a tier above batch waits, or one of batch that has waited as long as those count."""


NO_REASON = "no longer needed"


@dataclass(frozen=True, slots=True)
class Move:
    """Made or advised. Raises ValueError without a reason."""

    at_s: float
    knob: Knob
    before: float
    after: float
    reason: str
    is_made: bool

    def __post_init__(self) -> None:
        if not self.reason:
            raise ValueError(f"{self.knob.value} {self.before:g} -> {self.after:g}: a move needs its reason")


@dataclass(frozen=True, slots=True)
class ControlState:
    """What a decider hands on to the next, including what keeps it from swinging.

    Times are ages in seconds, as gateways' clocks differ. Unknown names of knobs and rules are ignored.
    """

    values: Mapping[str, float]
    """Position of each knob, without brakes, which every gateway knows itself."""
    rests: Mapping[str, float]
    turned: Mapping[str, tuple[float, int]]
    """By knob: when it last moved, and which way."""
    reversed_ago_s: float | None
    """When any knob last reversed."""
    held_ago_s: Mapping[str, float]
    """By rule."""
    holds: tuple[str, ...]
    moves: tuple[tuple[float, str, float, float, str], ...]
    """The last moves: age, knob, before, after, reason."""
    num_moves: int


@dataclass(frozen=True, slots=True)
class ControlRule:
    """A condition with hysteresis, and the knobs it pushes."""

    name: str
    begins: float
    ends: float
    goals: tuple[tuple[Knob, float], ...]
    lingers_s: float = 0.0
    """How long it holds on after its end: bursts return, and a knob turns back but once a minute."""

    def holds(self, value: float, held: bool) -> bool:
        """Whether it holds now, `held` before."""
        return value >= (self.ends if held else self.begins)


OVERLOAD = ControlRule("targets about to be missed", 0.05, 0.01, ((Knob.ADMISSION, FIRM),), BURSTS_S)
IN_GOOD_TIME = ControlRule(
    "overload, and most is served well within its target", 0.7, 0.5, ((Knob.ADMISSION, LENIENT),)
)
"""The forecast expects too much, or the load has fallen below the capacity."""
MOST_DOUBT = 0.25
"""The most that service in good time takes off the expected misses: it is older than they are."""
NEEDED = ControlRule(
    "a higher tier waits, or targets are about to be missed", 1.0, 1.0, ((Knob.QUOTA, LOWEST),)
)
SPARE = ControlRule("spare capacity", 0.5, 0.2, ((Knob.QUOTA, HIGHEST),))
"""It ends well below where it begins: what is lent uses some of the capacity that was idle."""
LENT = frozenset({Knob.QUOTA})
"""Knobs that lend unused capacity: taken back at once and whole when a rule asks for it."""
RULES = (
    # In order of rank: the first rule that holds decides about a knob.
    ControlRule(
        "KV nearly full",
        0.92,
        0.75,
        (
            (Knob.BATCH_CAP, LOWEST),
            (Knob.TOKEN_BUDGET, LOWEST),
            (Knob.LOOKAHEAD, LOWEST),
            (Knob.RESERVE_QUANTILE, HIGHEST),
        ),
    ),
    IN_GOOD_TIME,
    OVERLOAD,
    ControlRule(
        "targets missed",
        1 - TARGET,
        (1 - TARGET) / 2,
        ((Knob.EARLY_REFUSAL, HIGHEST), (Knob.BATCH_SHARE, LOWEST)),
    ),
    ControlRule("lengths widely spread", 1.0, 0.8, ((Knob.AGEING, LOWEST),)),
    ControlRule("prefix hits high", 0.6, 0.4, ((Knob.LOOKAHEAD, HIGHEST), (Knob.PREFIX_WEIGHT, HIGHEST))),
    NEEDED,
    SPARE,
)


class Control:
    """One pool's loop. One writer: the caller that observes."""

    def __init__(
        self,
        mode: ControlMode = ControlMode.OFF,
        bounds: Mapping[Knob, Bounds] = DEFAULT_BOUNDS,
        *,
        reversal_s: float = REVERSAL_S,
    ) -> None:
        """Knobs that are not in `bounds` are never moved."""
        self.mode = mode
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)
        """Latest last."""
        self.num_moves = 0
        """By any gateway of the pool."""
        self._values = {knob: knob_bounds.rest for knob, knob_bounds in bounds.items()}
        self._most: dict[Knob, float] = {}
        """Limits by an operator's brakes."""
        self._bounds = dict(bounds)
        self._reversal_s = reversal_s
        self._holds = {rule.name: False for rule in RULES}
        self._held_s = {rule.name: -float("inf") for rule in RULES}
        """By rule."""
        self._last: dict[Knob, tuple[float, int]] = {}
        """By knob: when it last moved, and which way."""
        self._reversed_s = -float("inf")

    @property
    def values(self) -> dict[Knob, float]:
        """Where the knobs are, or would be: advice follows its own advice."""
        return {knob: self._value(knob) for knob in self._values}

    def bound(self, knob: Knob, most: float) -> None:
        """Bounds the knob at `most`; where the rules want it is kept for when the bound ends."""
        self._most[knob] = most

    @property
    def in_force(self) -> dict[Knob, float]:
        """The real positions: at rest unless the mode is acting, and within the brakes."""
        if self.mode is ControlMode.ACTING:
            return self.values
        return {
            knob: min(knob_bounds.rest, self._most.get(knob, HIGHEST))
            for knob, knob_bounds in self._bounds.items()
        }

    def rest_at(self, rests: Mapping[Knob, float], reason: str, now_s: float) -> list[Move]:
        """Changes where knobs rest, within their bounds: what a policy's table says of the present state.

        A knob that no rule has moved goes there at once in every mode, others when their rule lets go.
        Unknown names have no effect. Returns the moves to be applied.
        """
        moves: list[Move] = []
        for knob, wanted in rests.items():
            bounds = self._bounds.get(knob)
            if bounds is None:
                continue
            rest = bounds.within(wanted)
            if rest == bounds.rest:
                continue
            stood = self.in_force[knob]
            self._bounds[knob] = replace(bounds, rest=rest)
            if self._values[knob] == bounds.rest:
                self._values[knob] = rest
            stands = self.in_force[knob]
            if stands != stood:
                moves.append(Move(now_s, knob, stood, stands, reason, is_made=True))
        self._note(moves)
        return moves

    @property
    def rests(self) -> dict[Knob, float]:
        return {knob: knob_bounds.rest for knob, knob_bounds in self._bounds.items()}

    def let_go(self, reason: str, now_s: float) -> list[Move]:
        """All knobs to rest at once: no gateway decides. Returns moves to be applied."""
        stood = self.in_force
        self._values = self.rests
        moves = [
            Move(now_s, knob, stood[knob], stands, reason, is_made=True)
            for knob, stands in self.in_force.items()
            if stands != stood[knob]
        ]
        self.moves.extend(moves)
        return moves

    # ------------------------------------------------------------ hand-over

    def state(self, now_s: float) -> ControlState:
        acts = self.mode is ControlMode.ACTING
        return ControlState(
            values={knob.value: value for knob, value in (self._values if acts else self.rests).items()},
            rests={knob.value: rest for knob, rest in self.rests.items()},
            turned={knob.value: (now_s - at_s, way) for knob, (at_s, way) in self._last.items()},
            reversed_ago_s=None if self._reversed_s == LOWEST else now_s - self._reversed_s,
            held_ago_s={name: now_s - at_s for name, at_s in self._held_s.items() if at_s > LOWEST},
            holds=tuple(name for name, holds in self._holds.items() if holds),
            moves=tuple(
                (now_s - move.at_s, move.knob.value, move.before, move.after, move.reason)
                for move in [move for move in self.moves if move.is_made][-HANDED_ON_MOVES:]
            ),
            num_moves=self.num_moves,
        )

    def adopt(self, state: ControlState, now_s: float) -> list[Move]:
        """Goes on from another's state, within our own bounds. Returns its moves that were not known here."""
        for knob, bounds in self._bounds.items():
            rest = bounds.within(state.rests.get(knob, bounds.rest))
            self._bounds[knob] = replace(bounds, rest=rest)
            self._values[knob] = bounds.within(state.values.get(knob, rest))
        self._last = {
            knob: (now_s - state.turned[knob][0], state.turned[knob][1])
            for knob in self._bounds
            if knob in state.turned
        }
        self._reversed_s = LOWEST if state.reversed_ago_s is None else now_s - state.reversed_ago_s
        self._held_s = {
            name: now_s - state.held_ago_s[name] if name in state.held_ago_s else LOWEST
            for name in self._held_s
        }
        self._holds = {name: name in state.holds for name in self._holds}
        new = max(0, state.num_moves - self.num_moves)
        moves = [
            Move(now_s - ago_s, Knob(knob), before, after, reason, is_made=True)
            for ago_s, knob, before, after, reason in (state.moves[-new:] if new else ())
            if knob in self._bounds
        ]
        self.moves.extend(moves)
        self.num_moves = state.num_moves
        return moves

    def take_back(self, moves: Sequence[Move], state: ControlState, now_s: float) -> None:
        """As if these last moves had never been decided: back to the state before them."""
        for _ in moves:
            self.moves.pop()
        self.adopt(state, now_s)

    def _note(self, moves: Sequence[Move]) -> None:
        self.moves.extend(moves)
        self.num_moves += sum(move.is_made for move in moves)

    # ------------------------------------------------------------ decisions

    def look(self, seen: Observation, now_s: float) -> list[Move]:
        """The moves now; those with `is_made` are to be applied. Empty when off."""
        if self.mode is ControlMode.OFF:
            return []
        wanted = self._wanted(seen, now_s)
        moves: list[Move] = []
        for knob in self._bounds:
            goal, reason = wanted.get(knob, (self._bounds[knob].rest, NO_REASON))
            move = self._push(knob, goal, reason, now_s)
            if move is not None:
                moves.append(move)
        self._note(moves)
        return moves

    def _wanted(self, seen: Observation, now_s: float) -> dict[Knob, tuple[float, str]]:
        missed = 0.0 if seen.attainment is None or seen.queued == 0 else 1 - seen.attainment
        is_overload = self._is_on(OVERLOAD, seen.expected_late, now_s)
        values = {
            "KV nearly full": max(seen.kv_share, 1.0 if seen.evictions else 0.0),
            OVERLOAD.name: seen.expected_late,
            IN_GOOD_TIME.name: seen.in_good_time * (1 - min(MOST_DOUBT, seen.expected_late))
            if is_overload
            else 0.0,
            "targets missed": missed,
            "lengths widely spread": seen.length_spread,
            "prefix hits high": seen.prefix_hit_share,
            NEEDED.name: float(seen.higher_waits or is_overload or missed >= 1 - TARGET),
            SPARE.name: seen.spare_share,
        }
        wanted: dict[Knob, tuple[float, str]] = {}
        for rule in RULES:
            value = values[rule.name]
            for knob, goal in rule.goals if self._is_on(rule, value, now_s) else ():
                wanted.setdefault(knob, (goal, f"{rule.name} ({value:.2f})"))
        return wanted

    def _is_on(self, rule: ControlRule, value: float, now_s: float) -> bool:
        self._holds[rule.name] = holds = rule.holds(value, self._holds[rule.name])
        if holds:
            self._held_s[rule.name] = now_s
        return now_s - self._held_s[rule.name] <= rule.lingers_s

    def _push(self, knob: Knob, goal: float, reason: str, now_s: float) -> Move | None:
        bounds, before = self._bounds[knob], self._values[knob]
        goal = bounds.within(goal)
        is_recall = knob in LENT and goal < before and reason != NO_REASON
        after = goal if is_recall else before + min(bounds.step, max(-bounds.step, goal - before))
        if after == before:
            return None
        way = 1 if after > before else -1
        last_s, last_way = self._last.get(knob, (-float("inf"), way))
        if way != last_way and not is_recall:
            is_own = knob is Knob.ADMISSION
            reversal_s, any_s = (
                (ADMISSION_REVERSAL_S, LOWEST) if is_own else (self._reversal_s, self._reversed_s)
            )
            # Who only returns to rest leaves the next minute to those that a rule speaks for.
            rest_s = reversal_s if reason == NO_REASON else 0.0
            if now_s - max(last_s + rest_s, any_s) < reversal_s:
                return None
            if knob not in LENT and not is_own:
                self._reversed_s = now_s
        stood = self._value(knob)
        self._values[knob] = after
        self._last[knob] = (now_s, way)
        stands = self._value(knob)
        if stands == stood:
            return None
        return Move(now_s, knob, stood, stands, reason, self.mode is ControlMode.ACTING)

    def _value(self, knob: Knob) -> float:
        return min(self._values[knob], self._most.get(knob, HIGHEST))
