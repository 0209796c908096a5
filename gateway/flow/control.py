"""Which knobs should stand elsewhere, seeing how the traffic is?

Scheduling as a control loop. A look at the traffic every few seconds (`Observation`) gives at most one move
of each knob, within its bounds, with its reason. The rules, by their objective (attainment first, goodput
second):

1. KV nearly full: smaller batches, and less is sent ahead, so that nobody is evicted in mid-answer.
2. Lengths widely spread: faster ageing, so that long answers do not starve whoever stands behind them.
3. Prefix hits high: more at once, since what is cached need not be computed.

and when none of them holds, back to where the operator put it. A target that is missed while requests wait is
for admission: it refuses earlier, as what is let in then is late in any case. Every rule has two thresholds
(hysteresis): it begins above the one, and ends below the other. A knob turns back at most once a minute.

Off, it does nothing; with advice it says what it would do and changes nothing; acting it calls the setters.
Pure: time is passed in, and what a move does is for whoever applies it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

MAX_MOVES = 1_000
REVERSAL_S = 60.0
"""A knob that went one way goes the other way no sooner."""
TARGET = 0.9
"""Attainment that is wanted."""


class Mode(StrEnum):
    """Whether moves are made."""

    OFF = "off"
    ADVICE = "advice"
    ACTING = "acting"


class Knob(StrEnum):
    """What can be moved."""

    BATCH_CAP = "batch_cap"
    """Share of an engine's sequences that run at once."""
    TOKEN_BUDGET = "token_budget"
    """Share of the tokens of a step."""
    LOOKAHEAD = "lookahead"
    """Sequences sent beyond what runs at once."""
    AGEING = "ageing"
    """Factor on the times after which requests move up."""
    EARLY_REFUSAL = "early_refusal"
    """Factor on the expected wait that admission compares with a deadline: above 1 it refuses earlier."""
    BATCH_SHARE = "batch_share"
    """Share of an engine that the batch tier may hold."""
    RESERVE_QUANTILE = "reserve_quantile"
    """Of the predicted output, held before a request runs."""
    PREFIX_WEIGHT = "prefix_weight"
    """How much routing goes by what is cached."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a knob may stand. Raises ValueError for bounds that do not hold their rest."""

    lowest: float
    rest: float
    """Where the operator put it, and where it returns to."""
    highest: float
    step: float
    """Of one move."""

    def __post_init__(self) -> None:
        if not (self.lowest <= self.rest <= self.highest and self.step > 0 and isfinite(self.step)):
            raise ValueError(
                f"a knob needs lowest <= rest <= highest and a positive step, not {self.lowest} <="
                f" {self.rest} <= {self.highest} by {self.step}"
            )


DEFAULT_BOUNDS: Mapping[Knob, Bounds] = {
    Knob.BATCH_CAP: Bounds(0.25, 1.0, 1.0, 0.125),
    Knob.TOKEN_BUDGET: Bounds(0.25, 1.0, 1.0, 0.125),
    Knob.LOOKAHEAD: Bounds(0.0, 2.0, 8.0, 1.0),
    Knob.AGEING: Bounds(0.25, 1.0, 1.0, 0.25),
    Knob.EARLY_REFUSAL: Bounds(1.0, 1.0, 2.0, 0.25),
    Knob.BATCH_SHARE: Bounds(0.1, 1.0, 1.0, 0.15),
    Knob.RESERVE_QUANTILE: Bounds(0.5, 0.9, 0.99, 0.1),
    Knob.PREFIX_WEIGHT: Bounds(0.0, 1.0, 4.0, 0.5),
}


@dataclass(frozen=True, slots=True)
class Observation:
    """The traffic of the last few seconds. Shares lie between 0 and 1."""

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


@dataclass(frozen=True, slots=True)
class Move:
    """One knob, moved or advised to."""

    at_s: float
    knob: Knob
    before: float
    after: float
    reason: str
    is_made: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition with hysteresis, and where it pushes which knobs."""

    name: str
    begins: float
    ends: float
    pushes: tuple[tuple[Knob, int], ...]
    """Knob, and -1 (down) or 1 (up)."""

    def holds(self, value: float, held: bool) -> bool:
        """Whether it holds now, `held` before."""
        return value >= (self.ends if held else self.begins)


RULES = (
    # In order of rank: the first rule that holds decides about a knob.
    Rule(
        "KV nearly full",
        0.92,
        0.75,
        ((Knob.BATCH_CAP, -1), (Knob.TOKEN_BUDGET, -1), (Knob.LOOKAHEAD, -1), (Knob.RESERVE_QUANTILE, 1)),
    ),
    Rule("targets missed", 1 - TARGET, (1 - TARGET) / 2, ((Knob.EARLY_REFUSAL, 1), (Knob.BATCH_SHARE, -1))),
    Rule("lengths widely spread", 1.0, 0.8, ((Knob.AGEING, -1),)),
    Rule("prefix hits high", 0.6, 0.4, ((Knob.LOOKAHEAD, 1), (Knob.PREFIX_WEIGHT, 1))),
)


class Control:
    """One pool's loop. One writer: whoever looks at the traffic."""

    def __init__(
        self,
        mode: Mode = Mode.OFF,
        bounds: Mapping[Knob, Bounds] = DEFAULT_BOUNDS,
        *,
        reversal_s: float = REVERSAL_S,
    ) -> None:
        """`bounds` names the knobs that there are; what is not in it is never moved."""
        self.mode = mode
        self.moves: deque[Move] = deque(maxlen=MAX_MOVES)
        """The last ones, the latest last."""
        self.values = {knob: each.rest for knob, each in bounds.items()}
        """Where the knobs stand, or would: advice follows its own advice."""
        self._bounds = dict(bounds)
        self._reversal_s = reversal_s
        self._holds = {rule.name: False for rule in RULES}
        self._last: dict[Knob, tuple[float, int]] = {}
        """When each knob moved last, and which way."""

    def look(self, seen: Observation, now_s: float) -> list[Move]:
        """What to move now; those with `is_made` are to be applied. Nothing when it is off."""
        if self.mode is Mode.OFF:
            return []
        wanted = self._wanted(seen)
        moves: list[Move] = []
        for knob in self._bounds:
            direction, reason = wanted.get(knob, (0, "nothing speaks for it any more"))
            move = self._push(knob, direction, reason, now_s)
            if move is not None:
                moves.append(move)
                self.moves.append(move)
        return moves

    def _wanted(self, seen: Observation) -> dict[Knob, tuple[int, str]]:
        missed = 0.0 if seen.attainment is None or seen.queued == 0 else 1 - seen.attainment
        values = {
            "KV nearly full": max(seen.kv_share, 1.0 if seen.evictions else 0.0),
            "targets missed": missed,
            "lengths widely spread": seen.length_spread,
            "prefix hits high": seen.prefix_hit_share,
        }
        wanted: dict[Knob, tuple[int, str]] = {}
        for rule in RULES:
            value = values[rule.name]
            self._holds[rule.name] = holds = rule.holds(value, self._holds[rule.name])
            for knob, direction in rule.pushes if holds else ():
                wanted.setdefault(knob, (direction, f"{rule.name} ({value:.2f})"))
        return wanted

    def _push(self, knob: Knob, direction: int, reason: str, now_s: float) -> Move | None:
        bounds, before = self._bounds[knob], self.values[knob]
        if direction:
            after = min(bounds.highest, max(bounds.lowest, before + direction * bounds.step))
        elif before < bounds.rest:
            after = min(bounds.rest, before + bounds.step)
        else:
            after = max(bounds.rest, before - bounds.step)
        if after == before:
            return None
        way = 1 if after > before else -1
        last_s, last_way = self._last.get(knob, (-float("inf"), way))
        if way != last_way and now_s - last_s < self._reversal_s:
            return None
        self.values[knob] = after
        self._last[knob] = (now_s, way)
        return Move(now_s, knob, before, after, reason, self.mode is Mode.ACTING)
