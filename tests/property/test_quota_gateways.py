"""Several gateways see in Redis what their Python twins see: rebuilds, restarts, lease ends.

Random histories of two gateways and two tenants on one virtual clock. Everything is lost, or the registry, or
one tenant's keys, or a server comes back with an old copy; gateways overtake one another in rebuilding,
restart, die while a tenant joins, and believe their clock to be an hour ahead. After every operation both
sides have given the same answer, know of the same epoch, and the registry says the same. What a request is
counted as is the matter of `test_quota_twins.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

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

from tenants.quota.redis import RedisQuotaStore
from tenants.quota.store import Granted, QuotaStore, QuotaStoreRecovering
from tenants.types import PLATFORM, Amounts, Meter, Window
from tests.property.registry_twin import Gateway, Shared
from tests.support.quota import Clock, histories, limit, on_platform, on_user, stepwise

SEQUENCES = 400
STEPS = 10
BATCH = 2
"""Of how many overdue leases of one tenant a gateway hears at once, instead of 200."""
TTL_S = 5.0

TENANTS = ("ten_a", "ten_b")
SHARED = [on_platform(amount=300, window=Window.MINUTE), on_platform(Meter.CONCURRENCY, amount=6)]
LIMITS = {
    tenant_id: [
        limit(amount=200, window=Window.MINUTE, tenant_id=tenant_id),
        SHARED[0],
        limit(Meter.OUTPUT_TOKENS, amount=150, rate_per_s=10, tenant_id=tenant_id),
        limit(Meter.CONCURRENCY, amount=4, tenant_id=tenant_id),
        limit(amount=2_000, tenant_id=tenant_id),
        on_user(tenant_id, amount=150, window=Window.MINUTE, tenant_id=tenant_id),
        SHARED[1],
    ]
    for tenant_id in TENANTS
}
EVERY_LIMIT = [*LIMITS["ten_a"], *(each for each in LIMITS["ten_b"] if each not in SHARED)]
EVERY_TENANT = (*TENANTS, PLATFORM)
HOLD = stepwise(10, 20, 40)
REGISTRY, SERVER = "fairgate:registry", "fairgate:server"

OPERATIONS = (
    "reserve",
    "top_up",
    "settle",
    "renew",
    "expire",
    "overdue",
    "states",
    "users",
    "repair",
    "ping",
)
REBUILDING = ("begin", "rebuild", "restore", "finish")

CASES = ("answered", "recovering", "unknown", "overrun", "begun", "busy", "not lost", "overtaken", "finished")
CASES += ("finished by the wrong one", "everything lost", "registry lost", "tenant lost", "time lost")
CASES += ("platform lost", "joined twice")
CASES += (
    "found again",
    "loss declared",
    "old loss declared",
    "overdue",
    "expired",
    "joined half",
    "wrong clock",
)

gateways = st.sampled_from((0, 1))
tenants = st.sampled_from(TENANTS)
numbers = st.integers(0, 99)


def tokens(count: int) -> Amounts:
    return Amounts(output_tokens=count)


@dataclass(frozen=True)
class Request:
    """What was granted at some time, whatever became of it."""

    request_id: str
    tenant_id: str
    charged_to: tuple[str, ...]


class Gateways(RuleBasedStateMachine):
    """`loop`, `stores`, `client`, `clocks` and `met` are set by the test."""

    loop: ClassVar[asyncio.AbstractEventLoop]
    stores: ClassVar[tuple[RedisQuotaStore, RedisQuotaStore]]
    client: ClassVar[redis.Redis]
    clocks: ClassVar[list[Clock]]
    met: ClassVar[Tally[str]]

    def __init__(self) -> None:
        super().__init__()
        self.met["sequences"] += 1
        self.clock = Clock()
        self.clocks[:] = [self.clock]
        self.client.delete(REGISTRY, SERVER, *(key for each in EVERY_TENANT for key in keys_of(each)))
        self.shared = Shared(self.clock)
        self.twins = [self.restarted(number) for number in (0, 1)]
        self.requests: list[Request] = []
        self.names = itertools.count()
        self.epochs = ["an epoch long ago"]

    def restarted(self, number: int) -> Gateway:
        """A gateway that knows nothing yet. (The same object: to make another takes longer.)"""
        store = self.stores[number]
        self.disconnect(number)
        store._epoch, store._registry.attempt, store._server_ahead_us = "", 0, 0
        store._places.clear()
        return Gateway(self.shared, BATCH)

    def disconnect(self, number: int) -> None:
        self.loop.run_until_complete(self.stores[number]._redis.connection_pool.disconnect())

    def both(self, number: int, call: Callable[[QuotaStore], Awaitable[object]]) -> object:
        """The same by one gateway and by its twin; asserts that the answers are equal, and what they know."""

        async def run() -> list[object]:
            found: list[object] = []
            for gateway in (self.twins[number], self.stores[number]):
                try:
                    found.append(await call(cast("QuotaStore", gateway)))
                except QuotaStoreRecovering:
                    found.append("recovering")
                except (KeyError, ValueError) as error:
                    found.append((type(error).__name__, *error.args))
            return found

        left, right = self.loop.run_until_complete(run())
        assert left == right
        assert self.twins[number].epoch == self.stores[number].epoch
        self.met["recovering" if left == "recovering" else "answered"] += 1
        return left

    def new_epoch(self) -> str:
        self.met["epochs"] += 1
        self.epochs.append(f"e{self.met['epochs']}")
        return self.epochs[-1]

    # ------------------------------------------------------------ what one gateway does

    def ask(self, number: int, what: str, tenant_id: str, pick: int) -> object:
        """One operation; which request it is about, and how much of it is used, is picked."""
        if what == "reserve":
            return self.reserve(number, tenant_id)
        request_id = self.requests[pick % len(self.requests)].request_id if self.requests else "nobody's"
        used = tokens(pick % 25)
        before = request_id in self.stores[number]._places
        asked: dict[str, Callable[[QuotaStore], Awaitable[object]]] = {
            "top_up": lambda store: store.top_up(request_id, used, tokens(25), tokens(30)),
            "settle": lambda store: store.settle(request_id, used),
            "renew": lambda store: store.renew([request_id, "unknown"], (1, 45)[pick % 2]),
            "expire": lambda store: store.expire(),
            "overdue": lambda store: store.overdue(),
            "states": lambda store: store.states(LIMITS[tenant_id]),
            "users": lambda store: store.end_users(tenant_id),
            "repair": lambda store: store.rebuild([(each, pick) for each in LIMITS[tenant_id]]),
            "ping": lambda store: store.ping(),
        }
        answer = self.both(number, asked[what])
        self.met["found again"] += not before and request_id in self.stores[number]._places
        raised = answer[0] if isinstance(answer, tuple) and answer else ""
        self.met["unknown"] += answer is False or raised == "KeyError"
        self.met["overrun"] += raised == "Overrun"
        if what == "overdue" and isinstance(answer, list):
            self.met["overdue"] += len(answer)
        if what == "expire" and isinstance(answer, list):
            self.met["expired"] += len(answer)
        return answer

    def reserve(self, number: int, tenant_id: str, lease_s: float = 30) -> object:
        request_id, limits = f"r{next(self.names)}", LIMITS[tenant_id]
        answer = self.both(number, lambda store: store.reserve(request_id, limits, HOLD, lease_s))
        if isinstance(answer, Granted):
            self.requests.append(Request(request_id, tenant_id, answer.charged_to))
        return answer

    def begin(self, number: int) -> bool:
        answer = self.both(number, lambda store: store.begin_rebuild(f"g{number}", TTL_S))
        self.met["begun" if answer else "busy" if self.shared.epoch is None else "not lost"] += 1
        return answer is True

    def rebuild(self, number: int, step: str, tenant_id: str, pick: int) -> object:
        """A step of a rebuild, by whoever believes to have the right to."""
        match step:
            case "begin":
                return self.begin(number)
            case "rebuild":
                used = [(each, pick) for each in LIMITS[tenant_id][: 1 + pick % 2]]
                return self.both(number, lambda store: store.rebuild(used))
            case "restore" if self.requests:
                each = self.requests[pick % len(self.requests)]
                limits, used_so_far = LIMITS[each.tenant_id], tokens(pick % 10)
                return self.both(
                    number,
                    lambda store: store.restore(
                        each.request_id, limits, each.charged_to, HOLD, used_so_far, 30
                    ),
                )
            case "finish":
                epoch = self.new_epoch()
                answer = self.both(number, lambda store: store.finish_rebuild(f"g{number}", epoch))
                self.met["finished by the wrong one" if answer == "recovering" else "finished"] += 1
                return answer
        return None

    # ------------------------------------------------------------ what happens

    @initialize(number=gateways, is_filled=st.booleans(), tenant_id=tenants)
    def a_new_redis(self, number: int, is_filled: bool, tenant_id: str) -> None:
        if is_filled:
            self.begin(number)
            self.rebuild(number, "finish", tenant_id, 0)
            self.reserve(number, tenant_id)

    @rule(number=gateways, what=st.sampled_from(OPERATIONS), tenant_id=tenants, pick=numbers)
    def somebody_asks(self, number: int, what: str, tenant_id: str, pick: int) -> None:
        self.ask(number, what, tenant_id, pick)

    @rule(number=gateways, tenant_id=tenants, leases_s=st.lists(st.sampled_from((1, 2, 30)), max_size=4))
    def several_come(self, number: int, tenant_id: str, leases_s: list[float]) -> None:
        for lease_s in leases_s:
            self.reserve(number, tenant_id, lease_s)

    @rule(
        number=gateways,
        seconds=st.sampled_from((0.5, 2, 6, 31, 61)),
        what=st.sampled_from(("overdue", "expire")),
    )
    def time_passes(self, number: int, seconds: float, what: str) -> None:
        self.clock.advance(seconds)
        self.ask(number, "overdue", TENANTS[0], 0)
        self.ask(number, what, TENANTS[0], 0)

    @precondition(lambda self: self.requests)
    @rule(number=gateways, pick=numbers)
    def another_gateway_settles_what_one_remembers(self, number: int, pick: int) -> None:
        """To renew it afterwards brings nothing back."""
        for who, what in ((number, "top_up"), (1 - number, "settle"), (number, "renew")):
            self.ask(who, what, TENANTS[0], pick)

    @rule(
        lost=st.sampled_from(("everything", "registry", "tenant", "tenant", "platform", "time")),
        number=gateways,
        what=st.sampled_from(OPERATIONS),
        tenant_id=tenants,
        pick=numbers,
    )
    def something_is_lost(self, lost: str, number: int, what: str, tenant_id: str, pick: int) -> None:
        """(A node of a cluster can lose what is on it, and no more. A server that was started again may have
        an old copy of everything.)"""
        if self.shared.epoch is None:
            self.one_rebuilds(number, 1, tenant_id, pick)
        if isinstance(self.reserve(number, tenant_id), Granted):
            pick = len(self.requests) - 1
        self.lose(lost, tenant_id)
        self.ask(number, what, tenant_id, pick)

    def lose(self, lost: str, tenant_id: str) -> None:
        gone = {"everything": EVERY_TENANT, "tenant": (tenant_id,), "platform": (PLATFORM,)}.get(lost, ())
        for each in gone:
            self.client.delete(*keys_of(each))
            self.shared.lose_tenant(each)
        if lost in ("everything", "registry"):
            # A rebuild is told from the one before by the server's time where the registry is gone, so no two
            # are in one microsecond.
            self.clock.advance(0.001)
            self.client.delete(REGISTRY)
            self.shared.lose_registry()
        if lost in ("everything", "time"):
            self.client.set(SERVER, "another process")
            self.shared.is_the_filled_server = False
        if lost == "time":
            for number in (0, 1):
                self.disconnect(number)
                self.twins[number].is_connected_anew = True
        self.met[f"{lost} lost"] += 1

    @rule(number=gateways, times=st.sampled_from((1, 1, 2)), tenant_id=tenants, pick=numbers)
    def somebody_rebuilds(self, number: int, times: int, tenant_id: str, pick: int) -> None:
        self.one_rebuilds(number, times, tenant_id, pick)

    def one_rebuilds(self, number: int, times: int, tenant_id: str, pick: int) -> None:
        """As `gateway/budget/counter_rebuild.py` does; perhaps it has to begin again at once."""
        for _ in range(times):
            self.begin(number)
            self.rebuild(number, "rebuild", tenant_id, pick)
            for each in range(min(3, len(self.requests))):
                self.rebuild(number, "restore", tenant_id, pick + each)
            pick += 1
        self.rebuild(number, "finish", tenant_id, pick)

    @rule(number=gateways, step=st.sampled_from(REBUILDING), tenant_id=tenants, pick=numbers)
    def somebody_is_at_a_rebuild(self, number: int, step: str, tenant_id: str, pick: int) -> None:
        self.rebuild(number, step, tenant_id, pick)

    @rule(
        slow=gateways,
        lost=st.sampled_from(("everything", "registry")),
        fills=st.booleans(),
        finishes_first=st.booleans(),
        step=st.sampled_from(REBUILDING[1:]),
        tenant_id=tenants,
        pick=numbers,
    )
    def one_is_overtaken(
        self, slow: int, lost: str, fills: bool, finishes_first: bool, step: str, tenant_id: str, pick: int
    ) -> None:
        """It stood still for longer than it had the right to rebuild, and goes on."""
        quick = 1 - slow
        self.lose(lost, tenant_id)
        for number in (slow, quick, slow):
            self.begin(number)
        self.clock.advance(TTL_S)
        self.begin(quick)
        if fills:
            self.rebuild(quick, "rebuild", tenant_id, pick)
        if finishes_first:
            self.rebuild(quick, "finish", tenant_id, pick)
        self.rebuild(slow, step, tenant_id, pick + 1)
        if not finishes_first:
            self.rebuild(quick, "finish", tenant_id, pick)
        self.met["overtaken"] += 1

    @rule(number=gateways, is_old=st.booleans())
    def a_loss_is_declared(self, number: int, is_old: bool) -> None:
        epoch = self.epochs[0 if is_old else -1]
        self.both(number, lambda store: cast("RedisQuotaStore", store).lose(epoch))
        self.met["old loss declared" if is_old else "loss declared"] += 1

    @rule(number=gateways)
    def a_gateway_restarts(self, number: int) -> None:
        self.twins[number] = self.restarted(number)

    @precondition(lambda self: self.shared.epoch is not None)
    @rule(number=gateways, tenant_id=tenants)
    def a_gateway_dies_while_a_tenant_joins(self, number: int, tenant_id: str) -> None:
        """Half of `Registry.join`: nobody held anything yet."""
        self.loop.run_until_complete(self.stores[number]._call("join", [REGISTRY], [f"t:{tenant_id}"]))
        self.shared.entered.setdefault(tenant_id, "joining")
        self.met["joined half"] += 1

    @precondition(lambda self: self.shared.epoch is not None)
    @rule(number=gateways, tenant_id=tenants)
    def a_gateway_is_slow_to_let_a_tenant_join(self, number: int, tenant_id: str) -> None:
        """Meanwhile the tenant has joined by another one, and holds."""
        if isinstance(self.reserve(1 - number, tenant_id), Granted):
            assert self.shared.epoch is not None
            entering = self.stores[number]._on_tenant("enter", tenant_id, [self.shared.epoch])
            self.loop.run_until_complete(entering)
            self.met["joined twice"] += 1

    @rule(number=gateways, ahead_s=st.sampled_from((-3_600, 3_600)), tenant_id=tenants, repairs=st.booleans())
    def a_gateways_clock_is_wrong(self, number: int, ahead_s: int, tenant_id: str, repairs: bool) -> None:
        """The windows are those of the server's clock all the same."""
        self.clock.advance(61)
        self.stores[number]._server_ahead_us = ahead_s * 1_000_000
        if repairs:
            self.ask(number, "repair", tenant_id, 1)
        self.reserve(number, tenant_id)
        self.met["wrong clock"] += 1

    # ------------------------------------------------------------ what always holds

    @invariant()
    def the_registry_says_what_its_twin_says(self) -> None:
        pipeline = self.client.pipeline(transaction=False).hgetall(REGISTRY)
        for tenant_id in EVERY_TENANT:
            pipeline.hmget(f"fairgate:{{{tenant_id}}}:counters", "#epoch", "#attempt")
        fields, *stamps = pipeline.execute()
        assert {name.decode(): value.decode() for name, value in fields.items()} == self.shared.registry()
        for tenant_id, (epoch, attempt) in zip(EVERY_TENANT, stamps, strict=True):
            keys = self.shared.keys(tenant_id)
            assert (epoch and epoch.decode(), int(attempt or 0)) == (keys.epoch, keys.attempt)
        self.shared.check()

    def teardown(self) -> None:
        """(Answers have shown the counters they touched; here are all, as another gateway finds them.)"""
        self.twins[0] = self.restarted(0)
        self.both(0, lambda store: store.states(EVERY_LIMIT))
        for seconds in (1.5, 90_000):
            self.clock.advance(seconds)
            self.both(0, lambda store: store.overdue())


def keys_of(tenant_id: str) -> list[str]:
    return [
        f"fairgate:{{{tenant_id}}}:{name}" for name in ("counters", "holds", "leases", "users", "resting")
    ]


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_gateways_and_their_twins_see_the_same(
    loop: asyncio.AbstractEventLoop, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenants.quota.redis.EXPIRE_BATCH", BATCH)
    Gateways.loop, Gateways.met, Gateways.clocks = loop, Tally(), []
    clock: Callable[[], Any] = lambda: Gateways.clocks[0]()  # noqa: E731
    Gateways.stores = (
        RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock),
        RedisQuotaStore(redis_url, timeout_s=30, virtual_clock=clock),
    )
    with redis.Redis.from_url(redis_url) as Gateways.client:
        run_state_machine_as_test(Gateways, settings=histories(SEQUENCES, STEPS))
    for store in Gateways.stores:
        loop.run_until_complete(store.close())
    assert Gateways.met["sequences"] >= SEQUENCES
    # A property that never met its cases proves nothing.
    for case in CASES:
        assert Gateways.met[case] > 2, (case, Gateways.met)
