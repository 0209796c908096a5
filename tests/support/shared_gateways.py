"""Several gateways that share a queue in Redis, in front of a simulated pool, on virtual time.

The sessions, scripts and control loops that serve. Each gateway has its own part of the queue, forecasts of
its own and its own control loop; each tenant's requests come in by one of them. Only Redis is real; it goes
by the clock of the simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from engine.messages import TenantShare
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import make_policy
from gateway.flow.control_rules import Control, ControlMode, Observation
from gateway.flow.controller import Dispatch, InFlight, QueueFull, Ticket
from gateway.flow.shared import codec
from gateway.flow.shared.codec import PoolRule
from gateway.flow.shared.control_session import ControlAnswer, ControlSession, control_keys, control_script
from gateway.flow.shared.mirror import Mirror
from gateway.flow.shared.protocol import PoolSession
from gateway.flow.window import Replica
from gateway.pools.control_loop import EVERY_S, bounds_of
from ops.simulate.control.steering import Steering, setters_of
from ops.simulate.pool import (
    SIMULATED_QUEUE,
    PoolObserver,
    SimulatedPool,
)
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import SimulatedRequest

PREFIX, POOL = "fairgate-simulated", "pool"
BEGAN_S = 1e9
"""What Redis's clock says when the simulation begins; 0 would be the server's own."""
LOOK_S = 0.5
"""As often as a gateway learns what waits at others."""
LOOK_TENANTS = 64
NEVER_STALE_US = 10**15


class SharedRedis:
    """What the gateways have in common. A Redis of its own; keys of an earlier run are deleted."""

    def __init__(self, client: Any) -> None:
        """`client`: a synchronous one."""
        self._client = client
        self._exchange = client.register_script(codec.script())
        self._look = client.register_script(codec.look_script())
        self._control = client.register_script(control_script())
        client.flushdb()

    def exchange(
        self, gateway_id: str, session: PoolSession, now_s: float, sizes: Sequence[Replica]
    ) -> bytes:
        """One message of a gateway's queue, and its answer."""
        message = session.message(now_s, sizes)
        assert message is not None, "one is out"
        arguments = message.arguments(_us(now_s), gateway_id)
        return bytes(self._said(self._exchange, codec.keys(PREFIX, POOL), arguments))

    def look(self) -> bytes:
        """What waits in the whole pool."""
        return bytes(self._said(self._look, codec.look_keys(PREFIX, POOL), [LOOK_TENANTS]))

    def control(self, arguments: Sequence[Any]) -> ControlAnswer:
        """One word of a control loop."""
        return ControlAnswer.of(self._said(self._control, control_keys(PREFIX, POOL), arguments))

    def _said(self, script: Any, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        return script(keys=keys, args=arguments)


class GatewayView:
    """The pool as one gateway sees it: its own part of the queue, and the engines."""

    def __init__(self, pool: SimulatedPool, redis: SharedRedis, number: int, policy: str) -> None:
        self.gateway_id = f"gateway-{number}"
        self.flow = Mirror(make_policy(policy).order, ServiceCounters(), SIMULATED_QUEUE)
        rule = PoolRule.of(self.flow.settings, NEVER_STALE_US)
        self.session = PoolSession(self.flow, rule, life=1)
        self._pool = pool
        self._redis = redis

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def exchange(self, now_s: float, sizes: Sequence[Replica]) -> list[Dispatch]:
        """Says everything; returns the turns that came."""
        turns: list[Dispatch] = []
        while True:
            answer = self._redis.exchange(self.gateway_id, self.session, now_s, sizes)
            turns += self.session.answered(answer, now_s).turns
            if not self.session.has_news:
                return turns

    def see_others(self, now_s: float) -> None:
        """Learns what waits at other gateways."""
        self.session.looked(self._redis.look(), now_s)


class SharedFlow:
    """The queue that the pool sees: stands for `FlowController` where several gateways have parts of one."""

    def __init__(self, gateways: Sequence[GatewayView]) -> None:
        self._gateways = gateways
        self._by_tenant: dict[str, GatewayView] = {}
        self._owner: dict[str, GatewayView] = {}
        """Of requests that have not ended, by entry id."""

    def of(self, tenant_id: str) -> GatewayView:
        """The gateway of a tenant; new ones take turns."""
        number = len(self._by_tenant) % len(self._gateways)
        return self._by_tenant.setdefault(tenant_id, self._gateways[number])

    def __len__(self) -> int:
        return sum(len(each.flow) for each in self._gateways)

    def enqueue(self, ticket: Ticket, now_s: float) -> QueueFull | None:
        owner = self.of(ticket.entry.tenant_id)
        full = owner.flow.enqueue(ticket, now_s)
        if full is None:
            owner.session.arrived(ticket)
            self._owner[ticket.entry.entry_id] = owner
        return full

    def dispatch(self, now_s: float, sizes: Sequence[Replica]) -> list[Dispatch]:
        turns: list[Dispatch] = []
        # What frees a place is told once a request waits for one.
        while len(self):
            new = [turn for each in self._gateways for turn in each.exchange(now_s, sizes)]
            turns += new
            if not new:
                break
        return turns

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        owner = self._owner[entry_id]
        owner.flow.progress(entry_id, output_tokens, live_sequences)
        owner.session.progressed(entry_id, output_tokens, live_sequences)

    def heard(self, replica_id: str, life: str, service: Mapping[str, TenantShare]) -> None:
        for tenant_id, share in service.items():
            self.of(tenant_id).flow.heard(replica_id, life, {tenant_id: share})

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> None:
        owner = self._owner.pop(entry_id)
        owner.flow.finish(entry_id, input_tokens, output_tokens, now_s)
        owner.session.finished(entry_id, input_tokens, output_tokens)

    @property
    def in_flight(self) -> Iterator[InFlight]:
        return chain.from_iterable(each.flow.in_flight for each in self._gateways)


class SharedSteering(Steering):
    """The control loop of one of the gateways; acting, one of them decides."""

    def __init__(
        self,
        mode: ControlMode,
        slo: SloLimits,
        view: GatewayView,
        redis: SharedRedis,
        first_s: float,
        is_mine: Callable[[str], bool],
    ) -> None:
        """`first_s`: when it looks first; `is_mine`: of tenants."""
        super().__init__(mode, slo)
        self._is_mine = is_mine
        self.lines: list[str] = []
        """What it told its operator."""
        self._view: Any = view
        self._redis = redis
        self._look_s = first_s
        as_pool: Any = view
        self._setters = setters_of(as_pool, self.admission)
        rests = view.flow.settings.rests.positions
        control = self._control = Control(mode, bounds_of(mode, self._setters, rests))
        self.session = ControlSession(control, view.gateway_id, self.lines.append)
        self.control = control
        self._stands = control.rests

    def owns(self, pool: SimulatedPool, row: int) -> bool:
        return self._is_mine(pool.records.tenants[pool.records.tenant[row]])

    def admits(self, request: SimulatedRequest) -> bool:
        """Whether a request that arrives here now is queued."""
        return self.admission.admits(self._view, request)

    def ended(self, row: int) -> None:
        """An answer of this gateway is complete."""
        self.admission.ended(self._view, row)

    def turn(self) -> None:
        """After a decision of the pool: one look, if it is time."""
        now_s: float = self._view.now_s
        if now_s < self._look_s or self.control.mode is ControlMode.OFF:
            return
        self._look_s = now_s + EVERY_S
        seen = self._observe(self._view)
        if self.control.mode is ControlMode.ACTING:
            self._together(seen, now_s)
        else:
            self.control.look(seen, now_s)
        for knob, value in self.control.in_force.items():
            if value != self._stands[knob]:
                self._stands[knob] = value
                self._setters[knob](value)

    def _together(self, seen: Observation, now_s: float) -> None:
        look = self.session.look(seen, self.control.look, now_s)
        try:
            words = next(look)
            while True:
                words = look.send(self._redis.control(words.arguments(_us(now_s))))
        except StopIteration:
            return


class SharedPool:
    """A pool behind several gateways, for one run."""

    def __init__(
        self, policy: str, pool: SimulatedPool, client: Any, mode: ControlMode, slo: SloLimits, gateways: int
    ) -> None:
        self.pool = pool
        self.redis = SharedRedis(client)
        self.views = [GatewayView(pool, self.redis, number, policy) for number in range(gateways)]
        flow: Any = SharedFlow(self.views)
        self._flow: SharedFlow = flow
        pool.flow = flow
        self.loops = {
            view.gateway_id: SharedSteering(
                mode, slo, view, self.redis, EVERY_S * (1 + number / len(self.views)),
                partial(self._is_of, view),
            )
            for number, view in enumerate(self.views)
        }  # fmt: skip
        self._next_look_s = 0.0

    def watch(self, *, foresees: bool) -> PoolObserver:
        """Hooks of the loops and of admission."""
        if not foresees:
            return PoolObserver(self._decided)
        return PoolObserver(
            self._decided,
            admits=lambda pool, request: self._loop(request.tenant).admits(request),
            on_ended=lambda pool, row: self._loop(pool.records.tenants[pool.records.tenant[row]]).ended(row),
        )

    def _is_of(self, view: GatewayView, tenant: str) -> bool:
        return self._flow.of(tenant) is view

    def _loop(self, tenant: str) -> SharedSteering:
        return self.loops[self._flow.of(tenant).gateway_id]

    def _decided(self, pool: SimulatedPool) -> None:
        if pool.now_s >= self._next_look_s:
            self._next_look_s = pool.now_s + LOOK_S
            for view in self.views:
                if view.session.belongs:
                    view.see_others(pool.now_s)
        for loop in self.loops.values():
            loop.turn()


def _us(now_s: float) -> int:
    return round((BEGAN_S + now_s) * 1e6)
