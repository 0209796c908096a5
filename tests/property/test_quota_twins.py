"""The in-process store and the Redis one do the same and keep the invariants.

Many short random histories over shared limits of every shape, on one virtual clock that also steps
back a little. After every operation both stores must have given the same answer and show the same counters,
and the books kept here must balance: reserved = charged + refunded + outstanding, nothing negative, no hard
limit exceeded in any window or any interval, every promise kept.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from tenants.quota import rules
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.redis import RedisQuotaStore
from tenants.quota.rules import LimitHold
from tenants.quota.store import (
    Denied,
    Granted,
    Hold,
    LimitState,
    Overrun,
    QuotaStore,
    QuotaStoreRecovering,
    TooManyEndUsers,
)
from tenants.types import Amounts, Limit, LimitMode, Meter, SubjectKind, Tier, Window
from tests.support.quota import Clock, histories, limit, on_platform, on_user

T = TypeVar("T")

SEQUENCES, SEQUENCES_LONG = 300, 2_000
STEPS = 8
NOTHING = Amounts(requests=0)

LIMITS = [
    limit(amount=400, window=Window.MINUTE),
    limit(amount=2_000, window=Window.HOUR, time_zone="Asia/Kolkata"),
    limit(Meter.OUTPUT_TOKENS, amount=500),
    limit(Meter.COST_NANOUSD, amount=900_000, window=Window.DAY, time_zone="Europe/Berlin"),
    limit(Meter.REQUESTS, amount=4, rate_per_s=0.25),
    limit(amount=300, rate_per_s=7.125),
    limit(Meter.OUTPUT_TOKENS, amount=10, rate_per_s=100),
    limit(Meter.CONCURRENCY, amount=2),
    limit(Meter.GPU_MS, amount=60, rate_per_s=11),
    limit(Meter.GPU_MS, amount=300, window=Window.MINUTE),
    limit(Meter.COST_NANOUSD, amount=250_000, window=Window.MINUTE, mode=LimitMode.SOFT),
    limit(
        Meter.OUTPUT_TOKENS,
        amount=90,
        rate_per_s=3,
        mode=LimitMode.SHADOW,
        kind=SubjectKind.KEY,
        subject_id="key_a",
    ),
    limit(Meter.OUTPUT_TOKENS, amount=120, window=Window.MINUTE, mode=LimitMode.SHADOW),
    limit(amount=200, rate_per_s=20, kind=SubjectKind.KEY, subject_id="key_a", tier=Tier.BATCH),
    on_platform(amount=350, window=Window.MINUTE),
    on_platform(Meter.OUTPUT_TOKENS, amount=200, rate_per_s=5),
    on_platform(Meter.CONCURRENCY, amount=3),
    on_user("amy", amount=150, window=Window.MINUTE),
    on_user("amy", amount=60, rate_per_s=2.5),
    on_user("bob", amount=150, window=Window.MINUTE),
    on_user("bob", Meter.CONCURRENCY, amount=2),
    on_user("cid", amount=60, rate_per_s=2.5),
    on_user("cid", Meter.GPU_MS, amount=60, window=Window.HOUR, mode=LimitMode.SOFT),
]
PLATFORM_LIMITS = [index for index, each in enumerate(LIMITS) if each.kind is SubjectKind.PLATFORM]
USERS = [index for index, each in enumerate(LIMITS) if each.kind is SubjectKind.END_USER]
MOST_USERS = 1
BUCKETS = [index for index, each in enumerate(LIMITS) if each.is_bucket]
#: So many per cent of the amounts above are the largest that a rule below ever sets.
LARGEST_PER_CENT = 150
LARGEST = {
    each.identity: each.amount * LARGEST_PER_CENT // 100
    for each in LIMITS
    if each.mode is LimitMode.HARD and not each.is_bucket and each.meter is not Meter.GPU_MS
}

NAMES = ("counters", "holds", "leases", "users", "resting")
KEYS = [
    "fairgate:registry",
    "fairgate:{platform}:counters",
    *(f"fairgate:{{ten_a}}:{name}" for name in NAMES),
]
KEYS += [f"fairgate:{{-}}:{name}" for name in NAMES]

#: Of the meters of which nothing may be used that is not held.
FIELD_OF = {
    Meter.TOTAL_TOKENS: "output_tokens",
    Meter.OUTPUT_TOKENS: "output_tokens",
    Meter.COST_NANOUSD: "cost_nanousd",
    Meter.REQUESTS: "requests",
}

#: Groups that meet often: the interesting refusals are those that one of several limits causes.
chosen_limits = st.one_of(
    st.sampled_from(
        (
            *(
                [0],
                [0, 2],
                [2],
                [3, 0],
                [9, 0],
                [6],
                [6, 2],
                [8],
                [8, 9],
                [5, 0, 7],
                [7, 0],
                [10, 2],
                [12, 0],
            ),
            *([14], [0, 14, 15], [16, 17, 18], [17, 0], [19, 20, 14], [21, 22], [21, 15]),
        )
    ),
    st.lists(st.sampled_from(range(len(LIMITS))), min_size=1, max_size=6, unique=True).map(sorted),
)
#: What is asked for first, and what more of it is wanted ahead and at most.
first_amounts = st.builds(
    Amounts,
    input_tokens=st.integers(0, 40),
    output_tokens=st.sampled_from((0, 1, 5, 10, 60)),
    cost_nanousd=st.integers(0, 200_000),
    requests=st.sampled_from((1, 1, 1, 0, 2)),
    gpu_ms=st.integers(0, 60),
)
more_amounts = st.builds(
    Amounts,
    input_tokens=st.just(0),
    output_tokens=st.sampled_from((0, 5, 100, 300)),
    cost_nanousd=st.sampled_from((0, 100_000)),
    requests=st.just(0),
    gpu_ms=st.sampled_from((0, 40)),
)


def plus(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(*(getattr(one, field) + getattr(other, field) for field in rules.FIELDS))


def risen(first: Amounts, ahead: Amounts, most: Amounts, may_be_cut: bool) -> Hold:
    wanted = plus(first, ahead)
    return Hold(first, wanted, plus(wanted, most), may_be_cut)


holds = st.builds(risen, first_amounts, more_amounts, more_amounts, st.booleans())
#: What of a hold is used: per thousand.
shares = st.tuples(*(st.sampled_from((0, 333, 1000, 1000)) for _ in range(5)))

CASES = ("granted", "settled", "topped up", "top-up denied", "overrun", "expired", "exceeded", "outlived")
CASES += ("denied bucket", "denied window", "denied concurrency", "would deny", "would deny a top-up")
CASES += ("cut short", "promise kept", "promise kept though full", "GPU time beyond the hold", "in debt")
CASES += ("charged while running", "rebuilt", "restored", "repeated", "unknown", "overdue", "repaired")
CASES += ("too many end users", "an end user gave way", "denied platform", "denied end user")
CASES += ("under later limits", "under later limits refused")
CASES += ("forgotten", "less than reported", "repaired below empty", "restored late")


@dataclass
class Live:
    """A request that holds, as this test sees it."""

    limits: list[Limit]
    names: tuple[str, ...]
    hold: Hold
    covered: Amounts
    used: Amounts


def whole(count: int) -> Hold:
    return Hold.whole(Amounts(output_tokens=count, requests=0))


def part_of(amounts: Amounts, per_thousand: tuple[int, ...]) -> Amounts:
    return Amounts(
        *(
            getattr(amounts, field) * share // 1000
            for field, share in zip(rules.FIELDS, per_thousand, strict=True)
        )
    )


class Twins(RuleBasedStateMachine):
    """`loop`, `redis`, `other`, `client`, `now` and `met` are set by the test."""

    loop: ClassVar[asyncio.AbstractEventLoop]
    redis: ClassVar[RedisQuotaStore]
    other: ClassVar[RedisQuotaStore]
    client: ClassVar[redis.Redis]
    now: ClassVar[list[Callable[[], float]]]
    met: ClassVar[Tally[str]]

    def __init__(self) -> None:
        super().__init__()
        self.met["sequences"] += 1
        self.clock = Clock()
        self.now[:] = [self.clock]
        self.limits = list(LIMITS)
        self.live: dict[str, Live] = {}
        self.users: set[str] = set()
        """The end user that came last."""
        self.names = itertools.count()
        # The books: by counter name, what was ever reserved, charged and refunded.
        self.reserved: Tally[str] = Tally()
        self.charged: Tally[str] = Tally()
        self.refunded: Tally[str] = Tally()
        # By bucket identity: (time, tokens) of every charge.
        self.flows: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self.latest_s = self.clock.now_s
        self.forget()
        self.both(lambda store: store.finish_rebuild("test", self.epoch()))

    def both(self, call: Callable[[QuotaStore], Awaitable[T]], gateway: RedisQuotaStore | None = None) -> T:
        """Runs the same on both (through that gateway's connection); asserts that the answers are equal."""

        async def run() -> list[object]:
            found: list[object] = []
            for store in (self.memory, gateway or self.redis):
                try:
                    found.append(await call(store))
                except TooManyEndUsers as error:
                    found.append(("TooManyEndUsers", error.most, error.retry_after_s))
                except (KeyError, Overrun, QuotaStoreRecovering) as error:
                    found.append(
                        (type(error).__name__, *error.args[: not isinstance(error, QuotaStoreRecovering)])
                    )
            return found

        left, right = self.loop.run_until_complete(run())
        assert left == right
        return left  # type: ignore[return-value]

    def forget(self) -> None:
        """Both stores lose everything, and are to be filled."""
        self.memory = MemoryQuotaStore(self.clock, max_end_users=MOST_USERS)
        self.client.delete(*KEYS)
        assert self.both(lambda store: store.begin_rebuild("test", 60))

    def epoch(self) -> str:
        self.met["epochs"] += 1
        return f"e{self.met['epochs']}"

    # ------------------------------------------------------------ the books

    def parts(self, request_id: str) -> list[LimitHold]:
        """What the store in this process says the request holds (the other one answers the same)."""
        held = self.memory._holds.get(request_id)
        return [] if held is None else list(held.parts)

    def book(self, request_id: str, before: list[LimitHold]) -> None:
        """A call has raised a hold, or turned a part of it into a charge."""
        live = self.live[request_id]
        nothing = [LimitHold()] * len(live.limits)
        after = self.parts(request_id)
        for each, name, old, new in zip(live.limits, live.names, before or nothing, after, strict=True):
            assert new.covered >= old.covered, "a hold never shrinks"
            assert new.charged >= old.charged
            self.reserved[name] += new.covered - old.covered
            self.flow(each, name, new.charged - old.charged)
            self.met["charged while running"] += new.charged > old.charged

    def flow(self, each: Limit, name: str, amount: int) -> None:
        self.charged[name] += amount
        if each.is_bucket and amount:
            self.flows[name].append((self.latest_s, amount))

    def end(self, request_id: str, before: list[LimitHold], used: Amounts) -> None:
        live = self.live.pop(request_id)
        for each, name, part in zip(live.limits, live.names, before, strict=True):
            actual = 0 if each.meter is Meter.CONCURRENCY else used.of(each.meter)
            rest = max(0, actual - part.charged)
            # GPU time beyond the hold is held and charged in one.
            self.reserved[name] += max(0, rest - part.held)
            self.flow(each, name, rest)
            self.refunded[name] += max(0, part.held - rest)

    # ------------------------------------------------------------ operations

    @initialize(
        chosen=chosen_limits, hold=holds, lease_s=st.sampled_from((60, 4_000)), times=st.sampled_from((1, 3))
    )
    def somebody_comes_first(self, **arguments: Any) -> None:
        self.some_are_reserved(**arguments)

    @rule(
        chosen=chosen_limits,
        hold=holds,
        lease_s=st.sampled_from((5, 60, 4_000)),
        times=st.sampled_from((1, 1, 3)),
    )
    def some_are_reserved(self, chosen: list[int], hold: Hold, lease_s: float, times: int) -> None:
        for _ in range(times):
            self.reserve(chosen, hold, lease_s)

    def reserve(self, chosen: list[int], hold: Hold, lease_s: float) -> str | None:
        """The request's id, if it was granted."""
        # Of one end user only.
        others = [index for index in chosen if index in USERS]
        others = [index for index in others if LIMITS[index].subject_id != LIMITS[others[0]].subject_id]
        request_id = f"r{next(self.names)}"
        limits = [self.limits[index] for index in chosen if index not in others]
        known = self.both(lambda store: store.end_users("ten_a"))
        answer = self.both(lambda store: store.reserve(request_id, limits, hold, lease_s))
        if isinstance(answer, tuple):
            self.met["too many end users"] += 1
            return None
        is_same = self.both(lambda store: store.end_users("ten_a")) == known
        user = rules.end_user_of(limits)
        self.met["an end user gave way"] += is_same and bool(user) and user not in self.users
        if isinstance(answer, Granted) and user:
            self.users = {user}
        if isinstance(answer, Denied):
            if (kind := answer.limit.kind.value) != "tenant":
                self.met[f"denied {kind.replace('_', ' ')}"] += 1
            shape = "bucket" if answer.limit.is_bucket else "window" if answer.limit.window else "concurrency"
            self.met[f"denied {shape}"] += 1
            return None
        assert isinstance(answer, Granted)
        self.met["granted"] += 1
        self.met["exceeded"] += len(answer.exceeded)
        self.met["would deny"] += len(answer.would_deny)
        self.met["cut short"] += answer.covered.output_tokens < hold.ahead.output_tokens
        self.live[request_id] = Live(limits, answer.charged_to, hold, answer.covered, Amounts(requests=0))
        self.book(request_id, [])
        for state in answer.states:
            if (
                state.limit.mode is LimitMode.HARD
                and state.limit.window
                and state.limit.meter is not Meter.GPU_MS
            ):
                # Also beside what is promised: nobody is admitted at the cost of another's worst case.
                assert state.used + state.held + state.worst_open <= state.limit.amount
        return request_id

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        share=shares,
        late_ms=st.sampled_from((0, 0, 50)),
        chunk=first_amounts,
        far=more_amounts,
    )
    def top_up(
        self, data: st.DataObject, share: tuple[int, ...], late_ms: int, chunk: Amounts, far: Amounts
    ) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[request_id]
        used = part_of(live.covered, share)
        first = plus(used, structs.replace(chunk, requests=0, input_tokens=0))
        used = structs.replace(used, gpu_ms=used.gpu_ms + late_ms)
        self.raise_to(request_id, used, first, plus(first, far))

    def raise_to(self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts) -> Granted | Denied:
        live, before = self.live[request_id], self.parts(request_id)
        answer = self.both(lambda store: store.top_up(request_id, used, first, ahead))
        assert isinstance(answer, Granted | Denied)
        self.book(request_id, before)
        live.used = rules.largest(live.used, used)
        self.met["GPU time beyond the hold"] += used.gpu_ms > live.covered.gpu_ms
        if isinstance(answer, Granted):
            for field in rules.FIELDS:
                assert getattr(answer.covered, field) >= getattr(live.covered, field)
            live.covered = answer.covered
            self.met["topped up"] += 1
            self.met["would deny a top-up"] += len(answer.would_deny)
        else:
            self.met["top-up denied"] += 1
        self.met["in debt"] += any(
            state.used > state.limit.amount for state in answer.states if state.limit.is_bucket
        )
        return answer

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chosen=chosen_limits, repeats=st.booleans())
    def a_request_comes_under_the_limits_in_force(
        self, data: st.DataObject, chosen: list[int], repeats: bool
    ) -> None:
        """Some are new to it, and some have other amounts now. It has not used anything."""
        fresh = sorted(key for key, each in self.live.items() if each.used == NOTHING and each.limits)
        fresh = [key for key in fresh if rules.tenant_of(self.live[key].limits) != rules.NO_TENANT]
        if not fresh:
            return
        request_id = data.draw(st.sampled_from(fresh))
        live, before = self.live[request_id], self.parts(request_id)
        now = {each.identity: each for each in self.limits}
        limits = [now[each.identity] for each in live.limits]
        user = rules.end_user_of(limits)
        for each in (self.limits[index] for index in chosen):
            if each.kind is SubjectKind.END_USER and (user := user or each.subject_id) != each.subject_id:
                continue
            if each not in limits:
                limits.append(each)
        most = live.covered if live.hold.may_be_cut else rules.largest(live.covered, live.hold.most)
        hold = Hold(live.covered, live.covered, most, live.hold.may_be_cut)
        answer = self.both(lambda store: store.rebind(request_id, limits, hold, NOTHING, must_fit=True))
        if not isinstance(answer, Granted):
            self.met["under later limits refused"] += isinstance(answer, Denied)
            return
        self.met["under later limits"] += len(limits) > len(live.limits)
        after = self.parts(request_id)
        assert after[: len(before)] == before
        for name, part in zip(answer.charged_to[len(before) :], after[len(before) :], strict=True):
            self.reserved[name] += part.covered
        if user:
            self.users = {user}
        live.limits, live.names, live.covered = limits, answer.charged_to, answer.covered
        if repeats:
            assert self.both(lambda store: store.rebind(request_id, limits, hold, NOTHING, must_fit=True))
            assert self.parts(request_id) == after

    @precondition(lambda self: any(not each.hold.may_be_cut for each in self.live.values()))
    @rule(data=st.data())
    def a_promise_is_claimed(self, data: st.DataObject) -> None:
        """Whoever may not be cut is raised to its worst case by all its windows, whatever else was admitted
        since, and whatever became of the amounts. (Buckets are rates: they promise nothing.)"""
        promised = sorted(key for key, each in self.live.items() if not each.hold.may_be_cut)
        request_id = data.draw(st.sampled_from(promised))
        live = self.live[request_id]
        if any(each.is_bucket and each.mode is LimitMode.HARD for each in live.limits):
            return
        was_full = any(state.available == 0 for state in self.both(lambda store: store.states(live.limits)))
        answer = self.raise_to(request_id, live.used, live.hold.most, live.hold.most)
        assert isinstance(answer, Granted)
        assert answer.covered.output_tokens >= live.hold.most.output_tokens
        assert answer.covered.cost_nanousd >= live.hold.most.cost_nanousd
        self.met["promise kept"] += 1
        self.met["promise kept though full"] += was_full

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        share=shares,
        late_ms=st.sampled_from((0, 0, 25)),
        is_less=st.sampled_from((False, False, True)),
    )
    def settle(self, data: st.DataObject, share: tuple[int, ...], late_ms: int, is_less: bool) -> None:
        """`is_less`: than what top-ups reported, as where the ledger's word counts."""
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[request_id]
        used = part_of(live.covered, share)
        used = used if is_less else rules.largest(live.used, used)
        self.settle_by(request_id, structs.replace(used, gpu_ms=used.gpu_ms + late_ms))

    def settle_by(self, request_id: str, used: Amounts) -> None:
        """Another gateway settles; this one still remembers the request."""
        before = self.parts(request_id)
        assert self.both(lambda store: store.settle(request_id, used), self.other) is True
        self.end(request_id, before, used)
        assert self.both(lambda store: store.top_up(request_id, used, used, used))[0] == "KeyError"  # type: ignore[index]
        assert self.both(lambda store: store.settle(request_id, used)) is False
        self.met["settled"] += 1
        self.met["unknown"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), by_top_up=st.booleans())
    def more_is_used_than_held(self, data: st.DataObject, by_top_up: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        live = self.live[request_id]
        exact = [
            (FIELD_OF[each.meter], part.covered)
            for each, part in zip(live.limits, self.parts(request_id), strict=True)
            if each.mode is LimitMode.HARD and each.meter in FIELD_OF
        ]
        if not exact:
            return
        field, covered = data.draw(st.sampled_from(exact))
        used = structs.replace(live.used, **{field: covered + 1})
        if by_top_up:
            answer = self.both(lambda store: store.top_up(request_id, used, used, used))
        else:
            answer = self.both(lambda store: store.settle(request_id, used))  # type: ignore[arg-type]
        assert isinstance(answer, tuple)
        assert answer[0] == "Overrun"
        self.met["overrun"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), hold=first_amounts.map(Hold.whole))
    def a_call_is_repeated(self, data: st.DataObject, hold: Hold) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        before = self.parts(request_id)
        limits = self.live[request_id].limits
        answer = self.both(lambda store: store.reserve(request_id, limits, hold, 1))
        assert isinstance(answer, Granted)
        assert answer.charged_to == self.live[request_id].names
        assert self.parts(request_id) == before
        self.met["repeated"] += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=shares)
    def a_request_outlives_its_minute(self, data: st.DataObject, share: tuple[int, ...]) -> None:
        """The next window is open when it asks for more, or ends."""
        self.time_passes(61)
        self.reserve([0, 9, 12], Hold.whole(Amounts()), 4_000)
        self.top_up(
            data, share, 0, Amounts(output_tokens=60, gpu_ms=9), Amounts(output_tokens=90, requests=0)
        )
        self.settle(data, share, 0, False)
        self.met["outlived"] += 1

    def promise(self, count: int) -> str | None:
        """A request of this minute that holds nothing yet and is promised so many tokens."""
        return self.reserve([0], Hold(NOTHING, NOTHING, Amounts(output_tokens=count, requests=0)), 4_000)

    def claim(self, request_id: str | None) -> None:
        """It asks for all it was promised."""
        if request_id in self.live:
            assert request_id is not None
            most = self.live[request_id].hold.most
            assert isinstance(self.raise_to(request_id, NOTHING, most, most), Granted)

    @rule(count=st.integers(1, 60), other=st.integers(0, 60), settles=st.booleans())
    def a_promise_outlives_its_minute(self, count: int, other: int, settles: bool) -> None:
        promised, beside = self.promise(count), self.reserve([0], whole(other), 4_000)
        # What is held on these windows is settled later: they are forgotten.
        few = Amounts(output_tokens=5, requests=0, gpu_ms=5)
        held = [self.reserve([index], Hold.whole(few), 4_000) for index in (9, 12)]
        empty = [self.reserve([index], whole(0), 4_000) for index in (9, 12)]
        self.time_passes(61)
        for index in (0, 9, 12):
            self.reserve([index], whole(other), 4_000)
        for request_id in held:
            if request_id in self.live:
                self.settle_by(request_id, few)
        for request_id in empty:
            if request_id in self.live:
                self.raise_to(request_id, NOTHING, NOTHING, NOTHING)
                self.raise_to(request_id, NOTHING, few, few)
                self.settle_by(request_id, NOTHING)
                self.met["forgotten"] += 1
        if promised in self.live:
            self.raise_to(promised, NOTHING, NOTHING, NOTHING)
        if settles and beside in self.live:
            self.settle_by(beside, NOTHING)
        self.claim(promised)

    @rule(
        index=st.sampled_from(BUCKETS),
        tokens=st.integers(1, 60),
        back_s=st.sampled_from((0, 1, 45)),
        data=st.data(),
    )
    def a_bucket_is_used_again_and_again(
        self, index: int, tokens: int, back_s: float, data: st.DataObject
    ) -> None:
        """While its size changes, and the clock steps back and forth."""
        for factor in (1, 1, 2):
            self.reserve([index], Hold.whole(Amounts(output_tokens=tokens * factor, gpu_ms=tokens)), 4_000)
            if self.live:
                self.settle(data, (1000,) * 5, 0, False)
            self.clock.now_s = round(self.clock.now_s - back_s, 6)
            back_s = -back_s
            self.change(index, data.draw(st.sampled_from((50, 100))))

    @rule(
        index=st.sampled_from((8, 8, 9, *BUCKETS)),
        count=st.integers(1, 40),
        late_ms=st.sampled_from((50, 0)),
        is_less=st.booleans(),
    )
    def a_request_reports_as_it_goes(self, index: int, count: int, late_ms: int, is_less: bool) -> None:
        """A step may take longer than was held. More is asked for than there is; an older report arrives
        late; less may be settled than was reported."""
        held = Amounts(output_tokens=count, requests=0, gpu_ms=count)
        request_id = self.reserve([index], Hold.whole(held), 4_000)
        if request_id is not None:
            used, far = structs.replace(held, gpu_ms=count + late_ms), Amounts(output_tokens=999, gpu_ms=999)
            for report, asked in ((used, far), (NOTHING, held), (used, held)):
                self.raise_to(request_id, report, asked, asked)
            self.settle_by(request_id, NOTHING if is_less else used)
            self.met["less than reported"] += is_less

    @rule(
        index=st.sampled_from(USERS),
        beside=st.sampled_from(([], [0], PLATFORM_LIMITS)),
        count=st.sampled_from((0, 20, 60, 151)),
        seconds=st.sampled_from((0, 0, 3, 61)),
    )
    def an_end_user_comes_and_goes(self, index: int, beside: list[int], count: int, seconds: float) -> None:
        request_id = self.reserve([index, *beside], whole(count), 4_000)
        if request_id is not None:
            self.raise_to(request_id, NOTHING, *[Amounts(output_tokens=count, requests=0)] * 2)
            self.time_passes(seconds)
            self.settle_by(request_id, part_of(self.live[request_id].covered, (500,) * 5))
        self.reserve([USERS[-1]], whole(1), 4_000)

    @rule(index=st.sampled_from((10, 11, 12)))
    def a_limit_that_refuses_nothing_is_exceeded(self, index: int) -> None:
        half = Amounts(output_tokens=60, requests=0, cost_nanousd=150_000)
        for _ in range(2):
            request_id = self.reserve([index], Hold.whole(half), 60)
            assert request_id is not None
            assert isinstance(self.raise_to(request_id, NOTHING, *[plus(half, half)] * 2), Granted)

    @rule(
        index=st.sampled_from((0, 9, 12, *BUCKETS)),
        more=st.sampled_from((3, 600)),
        is_over=st.booleans(),
        data=st.data(),
    )
    def a_counter_is_repaired(self, index: int, more: int, is_over: bool, data: st.DataObject) -> None:
        """The ledger knows of more than was counted; perhaps in a window nobody was in yet, or of more than a
        bucket holds."""
        request_id = self.reserve([index], Hold.whole(Amounts(output_tokens=10, gpu_ms=10)), 4_000)
        self.time_passes(61 if is_over else 0)
        [state] = self.both(lambda store: store.states([self.limits[index]]))
        used = state.used + more
        if state.limit.window is not None:
            counted = min(more, state.available)
            self.reserved[state.counter] += counted
            self.charged[state.counter] += counted
            used = self.charged[state.counter]
        self.both(lambda store: store.rebuild([(state.limit, used)]))
        self.met["repaired"] += 1
        self.met["repaired below empty"] += state.limit.is_bucket and used > state.limit.amount
        if request_id in self.live:
            self.raise_to(request_id, NOTHING, *[Amounts(output_tokens=12, gpu_ms=12)] * 2)
        if self.live:
            self.settle(data, (1000,) * 5, 0, False)

    # ------------------------------------------------------------ what happens around them

    @rule(seconds=st.sampled_from((0.001, 0.06, 0.5, 3.25, 61, 3_700, 90_000)))
    def time_passes(self, seconds: float) -> None:
        """(Leases that run out stay held until somebody expires them.)"""
        self.clock.now_s = round(self.clock.now_s + seconds, 6)
        self.latest_s = max(self.latest_s, self.clock.now_s)

    @rule(seconds=st.sampled_from((0, 5, 61, 4_001)))
    def leases_run_out(self, seconds: float) -> None:
        self.time_passes(seconds)
        before = {request_id: self.parts(request_id) for request_id in self.live}

        async def overdue(store: QuotaStore) -> list[str]:
            return sorted(await store.overdue())

        async def expire(store: QuotaStore) -> list[str]:
            return sorted(await store.expire())

        found = self.both(overdue)
        assert self.both(expire) == found
        for request_id in found:
            self.end(request_id, before[request_id], Amounts(requests=0))
            self.met["expired"] += 1
            self.met["overdue"] += 1

    @rule(
        what=st.sampled_from(("clock", "renew", "amount", "loss", "loss")),
        index=st.sampled_from(range(len(LIMITS))),
        per_cent=st.sampled_from((50, 100, LARGEST_PER_CENT)),
        seconds=st.sampled_from((0.002, 1, 45)),
    )
    def something_rare_happens(self, what: str, index: int, per_cent: int, seconds: float) -> None:
        match what:
            case "clock":
                self.clock.now_s = round(self.clock.now_s - seconds, 6)
            case "renew":
                self.both(lambda store: store.renew([*sorted(self.live)[:2], "nobody's"], seconds * 10))
            case "amount":
                self.change(index, per_cent)
            case "loss":
                self.everything_is_lost_and_rebuilt(is_asked=True, is_late=False)

    def change(self, index: int, per_cent: int) -> None:
        original = LIMITS[index]
        self.limits[index] = replace(original, amount=original.amount * per_cent // 100)

    @rule(is_late=st.booleans(), count=st.integers(1, 60))
    def a_loss_lies_between_two_minutes(self, is_late: bool, count: int) -> None:
        """`is_late`: the next one begins while holds are restored."""
        promised = self.promise(count)
        if not is_late:
            self.time_passes(61)
            if (spent := self.reserve([0], whole(count), 4_000)) is not None:
                self.settle_by(spent, Amounts(output_tokens=count, requests=0))
        self.everything_is_lost_and_rebuilt(is_asked=False, is_late=is_late)
        self.claim(promised)

    def everything_is_lost_and_rebuilt(self, *, is_asked: bool, is_late: bool) -> None:
        self.clock.now_s = self.latest_s
        states = self.both(lambda store: store.states(self.limits))
        before = {request_id: self.parts(request_id) for request_id in self.live}
        self.forget()
        if is_asked:
            self.nobody_is_served()
        used = [(state.limit, state.used) for state in states]
        self.both(lambda store: store.rebuild(used))
        for request_id, live in list(self.live.items()):
            held = rules.largest(live.covered, live.used)
            hold = structs.replace(live.hold, first=held, ahead=held)
            for _ in range(2):
                self.both(
                    lambda store, key=request_id, hold=hold, live=live: store.restore(  # type: ignore[misc]
                        key, live.limits, live.names, hold, live.used, 4_000
                    )
                )
            for name, old, new in zip(live.names, before[request_id], self.parts(request_id), strict=True):
                # What is restored may differ from what was held: the ledger knows one number for all limits.
                self.reserved[name] += max(0, new.covered - old.covered)
                self.refunded[name] += max(0, old.covered - new.covered)
                self.charged[name] += new.charged - old.charged
            self.met["restored"] += 1
        if is_late:
            self.one_of_the_next_minute_is_restored()
        epoch = self.epoch()
        self.both(lambda store: store.finish_rebuild("test", epoch))
        self.met["rebuilt"] += 1

    def nobody_is_served(self) -> None:
        nobody, nothing = next(iter(self.live), "nobody's"), Amounts()
        operations: tuple[Callable[[QuotaStore], Awaitable[object]], ...] = (
            lambda store: store.reserve("r", self.limits[:1], Hold.whole(nothing), 60),
            lambda store: store.top_up(nobody, nothing, nothing, nothing),
            lambda store: store.settle(nobody, nothing),
            lambda store: store.renew([nobody], 60),
            lambda store: store.expire(),
            lambda store: store.overdue(),
            lambda store: store.states(self.limits),
            lambda store: store.ping(),
        )
        for operation in operations:
            assert self.both(operation) == ("QuotaStoreRecovering",)

    def one_of_the_next_minute_is_restored(self) -> None:
        """(Another gateway admitted it from a slice of its own.)"""
        self.time_passes(61)
        each, request_id = self.limits[0], f"r{next(self.names)}"
        assert each.window is not None
        start_us, _ = rules.window_bounds_us(each.window, each.time_zone, round(self.clock.now_s * 1e6))
        name, hold = rules.charge_name_at(each, start_us), whole(5)
        self.both(lambda store: store.restore(request_id, [each], [name], hold, NOTHING, 4_000))
        self.live[request_id] = Live([each], (name,), hold, hold.first, NOTHING)
        self.book(request_id, [])
        self.met["restored late"] += 1

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_books_balance(self) -> None:
        self.memory.check()
        outstanding: Tally[str] = Tally()
        for request_id, live in self.live.items():
            for name, part in zip(live.names, self.parts(request_id), strict=True):
                outstanding[name] += part.held
        for name, reserved in self.reserved.items():
            spent = self.charged[name]
            assert rules.conserved(reserved, spent, self.refunded[name], outstanding[name]), name
            identity = name.partition("@")[0]
            if identity in LARGEST:
                # In any window (the name says which), with the largest amount the limit ever had.
                if ":concurrency:" in identity:
                    spent = 0
                assert spent + outstanding[name] <= LARGEST[identity]

    def teardown(self) -> None:
        """(Every answer has shown the counters it touched; here are all.)"""
        states: tuple[LimitState, ...] = self.both(lambda store: store.states(self.limits))
        outstanding: Tally[str] = Tally()
        for request_id, live in self.live.items():
            for name, part in zip(live.names, self.parts(request_id), strict=True):
                outstanding[name] += part.held
        for state in states:
            assert min(state.used, state.held, state.available, state.worst_open) >= 0
            assert state.held == outstanding[state.counter]
            if state.limit.window is not None and not self.is_forgotten(state.limit):
                assert state.used == self.charged[state.counter]
        self.no_interval_of_a_bucket_gives_more_than_burst_and_rate()

    def is_forgotten(self, limit: Limit) -> bool:
        """The clock stepped back into a window that an end user had used before it was dropped: it is refused
        until that is over."""
        users = self.memory._end_users.get(limit.tenant_id)
        is_here = users is None or limit.kind is not SubjectKind.END_USER or limit.subject_id in users
        return not is_here and self.clock.now_s * 1e6 < users.forgotten_us

    def no_interval_of_a_bucket_gives_more_than_burst_and_rate(self) -> None:
        for each in LIMITS:
            if not each.is_bucket or each.mode is not LimitMode.HARD or each.meter is Meter.GPU_MS:
                continue
            assert each.rate_per_s is not None
            burst, flows = each.amount * LARGEST_PER_CENT // 100, self.flows[each.identity]
            for start in range(len(flows)):
                total = 0
                for at_s, amount in flows[start:]:
                    total += amount
                    # A millisecond: times are counted in whole ones.
                    allowed = burst + each.rate_per_s * (at_s - flows[start][0] + 0.001)
                    assert total <= allowed + 1e-6


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize(
    "sequences",
    [SEQUENCES, pytest.param(SEQUENCES_LONG, marks=[pytest.mark.long, pytest.mark.timeout(1_800)])],
)
def test_memory_and_redis_are_twins(sequences: int, loop: asyncio.AbstractEventLoop, redis_url: str) -> None:
    Twins.loop, Twins.met, Twins.now = loop, Tally(), []
    Twins.redis, Twins.other = (
        RedisQuotaStore(
            redis_url, timeout_s=30, virtual_clock=lambda: Twins.now[0](), max_end_users=MOST_USERS
        )
        for _ in range(2)
    )
    with redis.Redis.from_url(redis_url) as Twins.client:
        run_state_machine_as_test(Twins, settings=histories(sequences, STEPS))
    for store in (Twins.redis, Twins.other):
        loop.run_until_complete(store.close())
    assert Twins.met["sequences"] >= sequences
    # A property that never met its cases proves nothing.
    for case in CASES:
        assert Twins.met[case] > 2, (case, Twins.met)
