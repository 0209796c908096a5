"""Spare capacity that token buckets refill by: how far above their rates, and since when.

A limit of tier batch may have a ceiling above its rate. The control loop sets for each model the share of the
way from rate to ceiling (the knob *quota*, `gateway/flow/control_rules.py`). A gateway keeps the last changes
with their times and passes them to the quota store with each call, so that an idle bucket is filled by the
shares that were in force meanwhile. Before the oldest kept change the rate counts, the lowest that it can
have been.

No call refills below the rate or above the ceiling, and each moment of a bucket is counted once, by the first
call. So gateways that share a counter need not agree at once: a late one counts the time since by the
previous share, for at most one look of its loop."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tenants.types import Limit, SubjectKind

WHOLE = 1_000
"""Of the way to the ceiling, in thousandths."""
MOST_CHANGES = 32
"""Changes of a model's share that are kept."""
ALL_MODELS = ""

History = tuple[tuple[int, int], ...]
"""Since when (milliseconds) which share (thousandths) was in force, the earliest first; before them none."""


class Spare(msgspec.Struct, frozen=True):
    """The shares of all models, on one clock."""

    by_model: Mapping[str, History] = {}

    def of(self, limit: Limit) -> History:
        """What a limit goes by; empty: its rate as it was set."""
        if limit.ceiling_per_s is None:
            return ()
        return self.by_model.get(limit.model or ALL_MODELS, ())


NO_SPARE = Spare()


class Refill(msgspec.Struct, frozen=True):
    """The refill rate of a limit with a ceiling, at admission."""

    meter: str
    rate_per_s: float
    ceiling_per_s: float
    refill_per_s: float


def refill_of(limit: Limit, refill_per_s: float | None) -> Refill | None:
    """None: it has no ceiling, or is on all tenants together: tenants read no numbers of those."""
    rate_per_s, ceiling_per_s = limit.rate_per_s, limit.ceiling_per_s
    if rate_per_s is None or ceiling_per_s is None or refill_per_s is None:
        return None
    if limit.kind is SubjectKind.PLATFORM:
        return None
    return Refill(limit.meter.value, rate_per_s, ceiling_per_s, refill_per_s)


def smallest(shares: Mapping[str, int], models: Iterable[str]) -> int:
    """The smallest share, none where a model has none. A bucket that fills faster because one model is idle
    would be spent on another one that is not."""
    return min((shares.get(model, 0) for model in models), default=0)


def effective(rate: int, ceiling: int, share: int) -> int:
    """A whole refill between rate and ceiling, so that nothing drifts."""
    return rate + max(0, ceiling - rate) * min(WHOLE, max(0, share)) // WHOLE


class SpareShares:
    """The shares that one gateway knows. `clock`: the quota store's, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shares: dict[str, int] = {}
        self._changes: dict[str, deque[tuple[int, int]]] = {}
        self._known = NO_SPARE

    def cover(self, models: Iterable[str]) -> None:
        """Until the shares of these models are set, a limit on all models has none."""
        for model in models:
            self._shares.setdefault(model, 0)

    def set(self, model: str, share: float) -> None:
        """From now on buckets of the model refill at this share (0 to 1) of the way to their ceilings."""
        self._shares[model] = min(WHOLE, max(0, round(share * WHOLE)))
        self._note(model, self._shares[model])
        self._note(ALL_MODELS, smallest(self._shares, self._shares))

    @property
    def known(self) -> Spare:
        return self._known

    def rate_per_s(self, limit: Limit) -> float:
        """What a bucket refills at now."""
        rate_per_s = limit.rate_per_s or 0.0
        history = self._known.of(limit)
        if not history or limit.ceiling_per_s is None:
            return rate_per_s
        return rate_per_s + max(0.0, limit.ceiling_per_s - rate_per_s) * history[-1][1] / WHOLE

    def ages(self) -> dict[str, History]:
        """How long ago (milliseconds) each share came into force, for a store with a clock of its own."""
        now_ms = self._now_ms()
        return {
            model: tuple((max(0, now_ms - since_ms), share) for since_ms, share in history)
            for model, history in self._known.by_model.items()
        }

    def _note(self, model: str, share: int) -> None:
        changes = self._changes.setdefault(model, deque(maxlen=MOST_CHANGES))
        if share == (changes[-1][1] if changes else 0):
            return
        now_ms = self._now_ms()
        if changes and changes[-1][0] >= now_ms:
            # Twice in a millisecond, or the clock was set back: what was said last counts.
            now_ms = changes.pop()[0]
        changes.append((now_ms, share))
        self._known = Spare({name: tuple(kept) for name, kept in self._changes.items() if kept})

    def _now_ms(self) -> int:
        return round(self._clock() * 1e6) // 1_000


def as_text(ages: Mapping[str, History]) -> str:
    """Ages as the Lua scripts read them; empty where there are none."""
    return json.dumps(ages, separators=(",", ":")) if ages else ""


def by_ages(ages: Mapping[str, History], now_ms: int) -> Spare:
    """The same shares on the clock that says `now_ms`."""
    if not ages:
        return NO_SPARE
    return Spare(
        {model: tuple((now_ms - age_ms, share) for age_ms, share in kept) for model, kept in ages.items()}
    )
