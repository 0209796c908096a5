"""Arithmetic of limits, shared by all quota stores. Pure.

Three kinds of counter. All integers stay below 2**53, so that Redis, which computes in doubles, gets the same
results; `lua/*.lua` follow this file line by line and are tested against it.

- A *window* (minute, hour, day, month in a time zone; lifetime) counts `used` and `held`; both start at
  zero with each window. A request is held on and charged to the window in which it was reserved, top-ups
  included, even if it continues into a later one; an ended window is kept while something is held
  on it. So no window's charges ever exceed its amount.

  A request that may not be cut holds a quantile of what it may need, but is *promised* its worst case:
  `worst_open` sums what such requests may still ask for beyond what they hold. Other requests find room
  only beside it: used + held + worst_open <= amount after every admission and top-up. A top-up within the
  promise moves tokens from `worst_open` to `held` and asks for no room, so it is never refused, whatever was
  admitted or changed meanwhile.
- A *token bucket* has a level that refills with `rate` up to `amount`. A hold does not lower the level,
  it only makes part of it unavailable; using it up or settling lowers the level. So over any interval of
  length t, however holds are nested, charged + outstanding <= amount + rate * t: exact, at the price that
  a bucket does not refill past its cap while much of it is held. Charges are not given back: they have
  flowed.

  A bucket with a ceiling refills faster while capacity is spare: `rate` is then what was in force at each
  moment (`spare.py`), between the rate that was set and the ceiling. When less is in force again, what the
  bucket has stays, and what is held stays.
- *Concurrency* counts holds.

Levels are kept in fractions of a unit (`scale`) and time in whole milliseconds, so that the refill per
millisecond is a whole number and nothing drifts however often it is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter, gt
from zoneinfo import ZoneInfo

import msgspec
from msgspec.structs import replace

from tenants.errors import Invalid
from tenants.quota.spare import NO_SPARE, History, Spare, effective
from tenants.quota.store import Denied, Hold, LimitState, Overrun
from tenants.types import (
    PLATFORM,
    TOKEN_METERS,
    Amounts,
    Limit,
    LimitMode,
    Meter,
    SubjectKind,
    Tier,
    Window,
)

MAX_COUNT = 9_000_000_000_000_000
"""The largest amount of anything; below 2**53."""
MAX_AMOUNT = MAX_COUNT // 2
"""The largest amount of one request; input and output together are a count as well."""
MAX_LIMITS = 192
"""Limits on one request's path."""
MAX_END_USERS = 10_000
"""Of a tenant, with counters at a time, unless the setting says otherwise."""
MAX_REQUEST_ID_CHARS = 80
MAX_LEASE_S = 86_400.0
HOLD_RETRY_S = 1.0
"""Retry time when only running requests are in the way: when they end is unknown."""
MAX_DEBT = 7_000_000_000_000
"""How far below zero a bucket's level may fall; with the largest level it stays below 2**53."""

NO_TENANT = "-"
"""Stands for the tenant of requests without limits of their tenant's, which are held as well."""
NEVER_US = MAX_COUNT
"""When a lifetime window with use in it is at rest."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_US = 1_000_000
_SIZES_US = {Window.MINUTE: 60 * _SECOND_US, Window.HOUR: 3_600 * _SECOND_US}


class WindowCounter(msgspec.Struct, frozen=True):
    """`end_us` 0: the window never ends."""

    start_us: int
    end_us: int
    used: int
    held: int
    worst_open: int
    """Promised beyond `held`."""


class BucketCounter(msgspec.Struct, frozen=True):
    """`level` (units times `scale`) as of `at_ms`; below zero: a debt of GPU time. `held` in units."""

    level: int
    at_ms: int
    held: int


class ConcurrencyCounter(msgspec.Struct, frozen=True):
    held: int


Counter = WindowCounter | BucketCounter | ConcurrencyCounter


class LimitHold(msgspec.Struct, frozen=True):
    """What one request holds on one limit."""

    held: int = 0
    charged: int = 0
    """Buckets: use reported by top-ups; no longer held."""
    most: int = 0
    """Windows: the promised total; 0: none."""

    @property
    def covered(self) -> int:
        """In total since the request began."""
        return self.held + self.charged

    @property
    def open(self) -> int:
        """Promised but not held yet."""
        return max(0, self.most - self.covered)


_NO_PART = LimitHold()


class Wish(msgspec.Struct, frozen=True):
    """What a request asks of one limit, in totals."""

    first: int
    ahead: int
    most: int
    """0: no promise."""


# ---------------------------------------------------------------- names


def charge_name(limit: Limit, counter: Counter) -> str:
    """Name of the counter that a request reserved now is charged to: identity and, for windows, start."""
    return counter_name(limit.identity, counter)


def charge_name_at(limit: Limit, start_us: int) -> str:
    """`charge_name` from the start of the window (0: no window)."""
    return limit.identity if limit.window is None else f"{limit.identity}@{start_us // _SECOND_US}"


def counter_name(identity_: str, counter: Counter) -> str:
    if isinstance(counter, WindowCounter):
        return f"{identity_}@{counter.start_us // _SECOND_US}"
    return identity_


def identity_in(name: str) -> str:
    return name.partition("@")[0]


def charged_limits(limits: Sequence[Limit], charged_to: Sequence[str]) -> list[tuple[Limit, int]]:
    """The `limits` that these charge names belong to, with the window's start (microseconds; 0: none)."""
    starts: dict[str, int] = {}
    for name in charged_to:
        _, _, start_s = name.partition("@")
        starts[identity_in(name)] = int(start_s or 0) * _SECOND_US
    return [(limit, starts[limit.identity]) for limit in limits if limit.identity in starts]


# ---------------------------------------------------------------- subjects


def tenant_of(limits: Sequence[Limit]) -> str:
    """Limits of the platform do not determine it."""
    return next((limit.tenant_id for limit in limits if limit.kind is not SubjectKind.PLATFORM), NO_TENANT)


def is_platforms(limit: Limit) -> bool:
    return limit.kind is SubjectKind.PLATFORM


def end_user_of(limits: Sequence[Limit]) -> str:
    """The end user of a request with these limits; empty: no limit is on one."""
    return next((limit.subject_id for limit in limits if limit.kind is SubjectKind.END_USER), "")


def end_user_in(name: str) -> str:
    """The end user in the name of a counter; empty: it is another subject's."""
    kind, _, rest = name.partition(":")
    return rest.partition(":")[0] if kind == SubjectKind.END_USER.value else ""


# ---------------------------------------------------------------- windows


@lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def window_bounds_us(window: Window, time_zone: str, now_us: int) -> tuple[int, int]:
    """Start and end (exclusive; 0: never) of the window that contains `now_us`. Days and months begin at
    local midnight, so a day may have 23 or 25 hours. Minutes and hours begin where the local clock's do."""
    if window is Window.LIFETIME:
        return 0, 0
    now = _EPOCH + timedelta(microseconds=now_us)
    zone = _zone(time_zone)
    local = now.astimezone(zone)
    if window in _SIZES_US:
        size_us = _SIZES_US[window]
        offset = local.utcoffset() or timedelta()
        start_us = now_us - (now_us + offset // timedelta(microseconds=1)) % size_us
        return start_us, start_us + size_us
    first = local.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    if window is Window.MONTH:
        first = first.replace(day=1)
    start_us, end_us = _instant_us(first, zone), _instant_us(_after(window, first), zone)
    if now_us >= end_us:
        # The clock was set back across midnight: this hour already belongs to the new window.
        first = _after(window, first)
        start_us, end_us = end_us, _instant_us(_after(window, first), zone)
    return start_us, end_us


def _after(window: Window, first: datetime) -> datetime:
    if window is Window.DAY:
        return first + timedelta(days=1)
    return (first + timedelta(days=32)).replace(day=1)


def _instant_us(local: datetime, zone: ZoneInfo) -> int:
    return (local.replace(tzinfo=zone).astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)


# ---------------------------------------------------------------- buckets


def rate_per_ms(limit: Limit) -> int:
    """Refill per millisecond, in units times the limit's `scale`: a whole number."""
    assert limit.rate_per_s is not None
    return round(limit.rate_per_s * limit.scale) // 1_000


def may_have_ceiling(limit: Limit) -> bool:
    """Whether it may follow spare capacity: no window, no money and nothing that refuses nothing does."""
    return (
        limit.is_bucket
        and limit.mode is LimitMode.HARD
        and limit.meter in TOKEN_METERS
        and limit.tier is Tier.BATCH
    )


def ceiling_per_ms(limit: Limit) -> int:
    """The most that is refilled per millisecond; at least `rate_per_ms`."""
    rate = rate_per_ms(limit)
    if limit.ceiling_per_s is None:
        return rate
    return max(rate, round(limit.ceiling_per_s * limit.scale) // 1_000)


def rate_now(limit: Limit, spare: Spare) -> int:
    history = spare.of(limit)
    rate = rate_per_ms(limit)
    return effective(rate, ceiling_per_ms(limit), history[-1][1]) if history else rate


def _refill(limit: Limit, level: int, from_ms: int, to_ms: int, history: History) -> int:
    cap, rate = limit.amount * limit.scale, rate_per_ms(limit)
    level, in_force = min(level, cap), rate
    for since_ms, share in history:
        until_ms = min(since_ms, to_ms)
        level = _flow(cap, level, in_force, until_ms - from_ms)
        from_ms = max(from_ms, until_ms)
        in_force = effective(rate, ceiling_per_ms(limit), share)
    return _flow(cap, level, in_force, to_ms - from_ms)


def _flow(cap: int, level: int, rate: int, for_ms: int) -> int:
    # Dividing first keeps the product below 2**53 (Lua).
    if for_ms > (cap - level) // rate:
        return cap
    return level + rate * max(0, for_ms)


# ---------------------------------------------------------------- counting


def advance(limit: Limit, counter: Counter | None, now_us: int, spare: Spare = NO_SPARE) -> Counter:
    """The counter at `now_us`; None: never used. A clock that steps back changes nothing."""
    if limit.is_bucket:
        now_ms = now_us // 1_000
        if counter is None:
            return BucketCounter(limit.amount * limit.scale, now_ms, 0)
        assert isinstance(counter, BucketCounter)
        level = _refill(limit, counter.level, counter.at_ms, now_ms, spare.of(limit))
        return BucketCounter(level, max(now_ms, counter.at_ms), counter.held)
    if limit.window is None:
        return counter or ConcurrencyCounter(0)
    if counter is not None:
        assert isinstance(counter, WindowCounter)
        if counter.end_us == 0 or now_us < counter.end_us:
            return counter
    start_us, end_us = window_bounds_us(limit.window, limit.time_zone, now_us)
    return WindowCounter(start_us, end_us, 0, 0, 0)


def room(limit: Limit, counter: Counter) -> int:
    """What may still be held, beside everything held and promised."""
    match counter:
        case WindowCounter():
            return max(0, limit.amount - counter.used - counter.held - counter.worst_open)
        case BucketCounter():
            return max(0, counter.level // limit.scale - counter.held)
        case ConcurrencyCounter():
            return max(0, limit.amount - counter.held)


def wish(limit: Limit, hold: Hold) -> Wish:
    if limit.meter is Meter.CONCURRENCY:
        return Wish(1, 1, 0)
    first = hold.first.of(limit.meter)
    if limit.is_bucket:
        return Wish(first, first, 0)
    return Wish(first, hold.ahead.of(limit.meter), 0 if hold.may_be_cut else hold.most.of(limit.meter))


def wish_more(limit: Limit, first: Amounts, ahead: Amounts) -> Wish:
    """What a top-up asks of this limit; it promises nothing more."""
    return wish(limit, Hold(first, ahead, ahead, may_be_cut=True))


def part_again(limit: Limit, hold: Hold, used: Amounts) -> LimitHold:
    """What an open request held on this limit, according to the ledger."""
    asked = wish(limit, hold)
    if limit.is_bucket:
        charged = used.of(limit.meter)
        return LimitHold(max(0, asked.first - charged), charged)
    return LimitHold(asked.ahead, most=asked.most)


def part_in_force(limit: Limit, part: LimitHold, again: LimitHold) -> LimitHold:
    """What a request that holds `part` holds on the limit as it is now. `again`: all that it may use
    (`part_again`), of which a limit that did not bind it until now may hold less."""
    if not is_exact(limit):
        return part
    return replace(part, held=max(part.held, again.covered - part.charged))


def wish_of(part: LimitHold) -> Wish:
    return Wish(part.held, part.held, part.most)


def is_resized(limit: Limit, now: Limit) -> bool:
    """Whether a limit of the same identity has another amount, rate or mode."""
    return (limit.amount, limit.rate_per_s, limit.mode) != (now.amount, now.rate_per_s, now.mode)


def changed(counter: Counter, old: LimitHold, new: LimitHold) -> Counter:
    """The counter after one request holds `new` in place of `old`."""
    held = counter.held + new.held - old.held
    match counter:
        case WindowCounter():
            worst_open = counter.worst_open + new.open - old.open
            return WindowCounter(counter.start_us, counter.end_us, counter.used, held, worst_open)
        case BucketCounter():
            return BucketCounter(counter.level, counter.at_ms, held)
        case ConcurrencyCounter():
            return ConcurrencyCounter(held)


def lacking(part: LimitHold, wish: Wish) -> int:
    """The room that this request needs to go on: nothing for what it was promised."""
    return max(0, max(wish.first, wish.most) - part.covered - part.open)


def reach(limit: Limit, counter: Counter, part: LimitHold, wish: Wish) -> LimitHold:
    """The hold once there is room for what it lacks: `ahead` as far as possible, at least `first`."""
    upto = wish.ahead
    if limit.mode is LimitMode.HARD:
        free = room(limit, counter) + part.open
        upto = min(upto, part.covered + free)
    return LimitHold(max(part.held, upto - part.charged), part.charged, max(part.most, wish.most))


def taken(limit: Limit, counter: Counter, wish: Wish) -> tuple[Counter, LimitHold] | None:
    """`is_short`, `reach` and `changed` in one, for a request without a hold. None: short, or not hard."""
    free = room(limit, counter)
    if limit.mode is not LimitMode.HARD or wish.first > free or wish.most > free:
        return None
    part = LimitHold(min(wish.ahead, free), most=wish.most)
    return changed(counter, _NO_PART, part), part


def charge(limit: Limit, counter: Counter, amount: int) -> Counter:
    """Charges what was used. The counter is that of the hold's window; a bucket's is advanced."""
    match counter:
        case WindowCounter():
            return WindowCounter(
                counter.start_us, counter.end_us, counter.used + amount, counter.held, counter.worst_open
            )
        case BucketCounter():
            level = max(lowest_level(limit), counter.level - amount * limit.scale)
            return BucketCounter(level, counter.at_ms, counter.held)
        case ConcurrencyCounter():
            return counter


def lowest_level(limit: Limit) -> int:
    """Lower bound of a bucket's level. 0: a debt of a shrunk or soft bucket is forgiven. Not of GPU time that
    a step took beyond the hold: the next requests wait for it."""
    return -MAX_DEBT if limit.meter is Meter.GPU_MS else 0


def use(limit: Limit, counter: Counter, part: LimitHold, used: int) -> tuple[Counter, LimitHold]:
    """Applies reported use: a bucket's hold becomes a charge, a window's stays (at least what was used)."""
    if isinstance(counter, BucketCounter):
        flowed = max(0, used - part.charged)
        after = LimitHold(max(0, part.held - flowed), part.charged + flowed, part.most)
        return charge(limit, changed(counter, part, after), flowed), after
    if isinstance(counter, WindowCounter):
        after = LimitHold(max(part.held, used), part.charged, part.most)
        return changed(counter, part, after), after
    return counter, part


def settle(limit: Limit, counter: Counter, part: LimitHold, actual: int) -> Counter:
    """Ends a hold and charges the part of `actual` that is not charged yet."""
    return charge(limit, changed(counter, part, _NO_PART), max(0, actual - part.charged))


def is_exact(limit: Limit) -> bool:
    """Whether use is bounded by the hold. GPU time is not, as it is known only afterwards."""
    return limit.mode is LimitMode.HARD and limit.meter not in (Meter.GPU_MS, Meter.CONCURRENCY)


def check_covered(limit: Limit, part: LimitHold, used: int) -> None:
    """Raises `Overrun` where more was used than a hard limit holds."""
    if is_exact(limit) and used > part.covered:
        raise Overrun(limit.identity, part.covered, used)


def covered(limits: Sequence[Limit], parts: Sequence[LimitHold], ahead: Amounts) -> Amounts:
    """`Granted.covered`; `ahead`: the largest asked for."""
    least: dict[Meter, int] = {}
    for limit, part in zip(limits, parts, strict=True):
        if limit.mode is LimitMode.HARD:
            least[limit.meter] = min(part.covered, least.get(limit.meter, part.covered))
    input_tokens = least.get(Meter.INPUT_TOKENS, ahead.input_tokens)
    output_tokens = least.get(Meter.OUTPUT_TOKENS, ahead.output_tokens)
    if (total := least.get(Meter.TOTAL_TOKENS)) is not None:
        input_tokens = min(input_tokens, total)
        output_tokens = min(output_tokens, total - input_tokens)
    return Amounts(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cost_nanousd=least.get(Meter.COST_NANOUSD, ahead.cost_nanousd),
        requests=least.get(Meter.REQUESTS, ahead.requests),
        gpu_ms=least.get(Meter.GPU_MS, ahead.gpu_ms),
    )


def largest(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(*(max(getattr(one, field), getattr(other, field)) for field in FIELDS))


def is_exceeded(limit: Limit, counter: Counter) -> bool:
    """Whether more is used and held than the limit allows; by holds only on soft and shadow limits."""
    match counter:
        case WindowCounter():
            return counter.used + counter.held > limit.amount
        case BucketCounter():
            return counter.held * limit.scale > counter.level
        case ConcurrencyCounter():
            return counter.held > limit.amount


def with_used(limit: Limit, counter: Counter, used: int) -> Counter:
    """An advanced counter with its use set from the ledger; holds stay."""
    match counter:
        case WindowCounter():
            return replace(counter, used=used)
        case BucketCounter():
            return replace(counter, level=max(0, limit.amount - used) * limit.scale)
        case ConcurrencyCounter():
            return counter


def rest_us(limit: Limit, counter: Counter) -> int:
    """When an unheld counter is at rest, as if never used; spare capacity only fills buckets earlier."""
    match counter:
        case WindowCounter():
            return (counter.end_us or NEVER_US) if counter.used else 0
        case BucketCounter():
            missing = limit.amount * limit.scale - counter.level
            return (counter.at_ms - (-missing // rate_per_ms(limit))) * 1_000 if missing > 0 else 0
        case ConcurrencyCounter():
            return 0


def until_rest_s(rest_us: int | None, now_us: int) -> float | None:
    """Seconds until the first end user comes to rest; None: never, as all have used what does not come back.
    `rest_us` None: requests of all of them are under way."""
    if rest_us is None:
        return HOLD_RETRY_S
    return None if rest_us >= NEVER_US else (rest_us - now_us) / _SECOND_US


# ---------------------------------------------------------------- answers


def view(limit: Limit, counter: Counter, now_us: int, spare: Spare = NO_SPARE) -> LimitState:
    """The state of an advanced counter, for callers."""
    name, available = charge_name(limit, counter), room(limit, counter)
    match counter:
        case WindowCounter():
            reset_s = (counter.end_us - now_us) / _SECOND_US if counter.end_us else math.inf
            return LimitState(
                limit, counter.used, counter.held, available, max(0.0, reset_s), name, counter.worst_open
            )
        case BucketCounter():
            missing = limit.amount * limit.scale - counter.level
            used = limit.amount - counter.level // limit.scale
            rate = rate_now(limit, spare)
            refill_per_s = rate * 1_000 / limit.scale
            return LimitState(
                limit, used, counter.held, available, _flow_s(rate, missing), name, refill_per_s=refill_per_s
            )
        case ConcurrencyCounter():
            return LimitState(limit, 0, counter.held, available, 0.0, name)


def retry_after_s(
    limit: Limit, counter: Counter | None, part: LimitHold, wanted: int, now_us: int, rate: int
) -> float | None:
    """When to ask again for `wanted` more; None: waiting cannot help. A running request (`part`) keeps its
    window. `counter` None: an ended window that was dropped. `rate`: a bucket's refill per millisecond."""
    if counter is None or wanted > limit.amount:
        return None
    match counter:
        case WindowCounter():
            stays = part != LimitHold() or counter.end_us == 0
            left_s = math.inf if stays else (counter.end_us - now_us) / _SECOND_US
            if counter.used + part.covered + wanted <= limit.amount:
                return min(HOLD_RETRY_S, left_s)
            return None if left_s == math.inf else left_s
        case BucketCounter():
            missing = wanted * limit.scale - counter.level
            if counter.held + wanted <= limit.amount:
                return _flow_s(rate, missing + counter.held * limit.scale)
            return max(HOLD_RETRY_S, _flow_s(rate, missing))
        case ConcurrencyCounter():
            return HOLD_RETRY_S


def _flow_s(rate: int, scaled: int) -> float:
    return max(0, -(-scaled // rate)) / 1_000


def is_short(limit: Limit, counter: Counter | None, part: LimitHold, wish: Wish) -> bool:
    """Whether there is no room for what the request lacks. `counter` None: a dropped window, without room."""
    return lacking(part, wish) > (0 if counter is None else room(limit, counter))


def refuse(
    limits: Sequence[Limit],
    counters: Sequence[Counter | None],
    parts: Sequence[LimitHold],
    wishes: Sequence[Wish],
    now_us: int,
    rate_of: Callable[[Limit], int] = rate_per_ms,
) -> Denied | None:
    """None when every hard limit has room; else the refusal, naming the limit that blocks longest. The
    counters are advanced, or (top-ups) of the request's own windows. `states` is left empty."""
    worst: tuple[float, Denied] | None = None
    for limit, counter, part, wish in zip(limits, counters, parts, wishes, strict=True):
        if limit.mode is not LimitMode.HARD or not is_short(limit, counter, part, wish):
            continue
        wanted, available = lacking(part, wish), 0 if counter is None else room(limit, counter)
        rate = rate_of(limit) if limit.is_bucket else 0
        after_s = retry_after_s(limit, counter, part, wanted, now_us, rate)
        length = math.inf if after_s is None else after_s
        if worst is None or length > worst[0]:
            worst = (length, Denied(limit, wanted, available, after_s))
    return None if worst is None else worst[1]


def refusal_by(states: Sequence[LimitState], hold: Hold) -> Denied | None:
    """The refusal of a reservation of `hold` by the states of all its limits; None: it would be granted.
    Buckets are known to a whole unit, so their `retry_after_s` is late by up to one unit."""
    limits = [state.limit for state in states]
    wishes = [wish(limit, hold) for limit in limits]
    rates = {
        state.limit.identity: round(state.refill_per_s * state.limit.scale / 1_000)
        for state in states
        if state.refill_per_s is not None
    }
    seen, parts = [_seen(state) for state in states], [_NO_PART] * len(limits)
    denied = refuse(
        limits, seen, parts, wishes, 0, lambda limit: rates.get(limit.identity) or rate_per_ms(limit)
    )
    return None if denied is None else replace(denied, states=tuple(states))


def _seen(state: LimitState) -> Counter:
    """The counter of a state, at the instant 0."""
    limit = state.limit
    if limit.is_bucket:
        return BucketCounter((limit.amount - state.used) * limit.scale, 0, state.held)
    if limit.window is None:
        return ConcurrencyCounter(state.held)
    # A window that is about to end has not: 0 would be one without an end.
    end_us = 0 if state.reset_s == math.inf else max(1, round(state.reset_s * _SECOND_US))
    return WindowCounter(0, end_us, state.used, state.held, state.worst_open)


# ---------------------------------------------------------------- validation


FIELDS = ("input_tokens", "output_tokens", "cost_nanousd", "requests", "gpu_ms")


_values = attrgetter(*FIELDS)


def check_amounts(amounts: Amounts) -> None:
    """Raises `Invalid` for what cannot be counted exactly."""
    for value in _values(amounts):
        if type(value) is not int or not 0 <= value <= MAX_AMOUNT:
            name = next(field for field in FIELDS if getattr(amounts, field) is value)
            raise Invalid(name, f"must be a whole number between 0 and {MAX_AMOUNT}")


def check_rising(*steps: Amounts) -> None:
    """Raises `Invalid` for amounts that cannot be counted exactly or that fall."""
    check_amounts(steps[0])
    for smaller, larger in pairwise(steps):
        if larger is smaller:
            continue  # a short answer is held whole: all steps are one
        check_amounts(larger)
        if any(map(gt, _values(smaller), _values(larger))):
            name = next(field for field in FIELDS if getattr(smaller, field) > getattr(larger, field))
            raise Invalid(name, "must not fall from `first` to `ahead` to `most`")


def check_request(request_id: str, lease_ttl_s: float) -> None:
    """Raises `Invalid` for an unusable request id or lease."""
    if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise Invalid("request_id", f"must have 1 to {MAX_REQUEST_ID_CHARS} characters")
    if not 0 < lease_ttl_s <= MAX_LEASE_S:
        raise Invalid("lease_ttl_s", f"must lie between 0 and {MAX_LEASE_S:g} seconds")


def check_limits(limits: Sequence[Limit]) -> None:
    """Raises `Invalid` unless the limits are one tenant's, distinct, well-formed and exact."""
    if len(limits) > MAX_LIMITS:
        raise Invalid("limits", f"more than {MAX_LIMITS} limits on one request")
    if len({limit.tenant_id for limit in limits} - {PLATFORM}) > 1:
        raise Invalid("limits", "of more than one tenant")
    if len({limit.subject_id for limit in limits if limit.kind is SubjectKind.END_USER}) > 1:
        raise Invalid("limits", "of more than one end user")
    if len({limit.identity for limit in limits}) < len(limits):
        raise Invalid("limits", "the same limit twice")
    for limit in limits:
        _check_limit(limit)


@lru_cache(maxsize=4096)
def _check_limit(limit: Limit) -> None:
    if not 0 <= limit.amount <= MAX_COUNT:
        raise Invalid("amount", f"must lie between 0 and {MAX_COUNT}")
    if (limit.window is not None) + limit.is_bucket + (limit.meter is Meter.CONCURRENCY) != 1:
        raise Invalid("limit", "needs exactly one shape: window, rate_per_s, or meter concurrency")
    if limit.is_bucket:
        if not 1 <= limit.amount <= MAX_COUNT // limit.scale:
            raise Invalid("amount", f"a bucket holds 1 to {MAX_COUNT // limit.scale}")
        if not 1 <= rate_per_ms(limit) <= MAX_COUNT // 1_000:
            raise Invalid("rate_per_s", "is too small or too large to be counted exactly")
        if ceiling_per_ms(limit) > MAX_COUNT // 1_000:
            raise Invalid("ceiling_per_s", "is too large to be counted exactly")
    if limit.ceiling_per_s is not None and not may_have_ceiling(limit):
        raise Invalid("ceiling_per_s", "only hard rates of tokens in tier batch have one")


def conserved(reserved: int, charged: int, refunded: int, outstanding: int) -> bool:
    """Every reserved unit is charged, refunded or outstanding."""
    return min(reserved, charged, refunded, outstanding) >= 0 and reserved == charged + refunded + outstanding
