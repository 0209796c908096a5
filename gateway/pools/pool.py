"""Pools: each is one served model with its replicas, queue, forecasts and lifecycle. They share accounts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.forecast.calibration import Calibration
from engine.messages import TIER_RANKS, Ready, SamplingParams
from gateway.dispatch.dispatcher import Dispatcher, NoEngineAvailable
from gateway.domain.call import OPENAI_DEFAULTS, Call, ServedModel
from gateway.estimates.estimator import Estimator
from gateway.explain.minutes.engine_meter import EngineMeter
from gateway.explain.minutes.flow_meter import FlowMeter
from gateway.explain.shares import ShareMeter
from gateway.flow.controller import FlowController
from gateway.flow.lanes import long_tokens_of
from gateway.pools.control_loop import ControlLoop
from gateway.requests.lifecycle import Lifecycle
from gateway.requests.parse import Renderer
from gateway.requests.run import Run
from gateway.upstream.base import takes_turns
from gateway.upstream.capabilities import MEDIA_NEEDS, ServerOffer
from gateway.upstream.replica_set import ReplicaSet

log = logging.getLogger("fairgate.gateway")


def queued_as(tier: str) -> str:
    """Among counts by the names of replicas, none of which has a space."""
    return f"queued {tier}"


@dataclass(frozen=True)
class PoolSpec:
    name: str
    upstreams: ReplicaSet
    renderer: Renderer
    is_estimated: bool = False
    """No tokenizer is known: prompts are counted by bytes, with a margin."""
    is_foreign: bool = False
    """Some replica is not our own engine: its sizes and steps are unknown."""
    image_tokens: int = 0
    """Held for each image of a request."""
    max_body_bytes: int = 0
    """Largest body of a request with images; 0: as for any other."""
    is_token_fair: bool = True
    """Every replica shares its steps by weight, stops at leases and keeps outcomes: our engine or a server
    with our plug-in. Otherwise fairness ends at the dispatch."""
    sampling: SamplingParams = OPENAI_DEFAULTS


@dataclass(frozen=True)
class PoolMeters:
    """Service of one pool, counted once a second."""

    flow: FlowMeter
    engines: EngineMeter
    shares: ShareMeter = field(default_factory=ShareMeter)


@dataclass(frozen=True)
class ModelPool:
    spec: PoolSpec
    flow: FlowController
    dispatcher: Dispatcher
    estimates: Estimator
    lifecycle: Lifecycle
    control: ControlLoop
    meters: PoolMeters

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def has_engine(self) -> bool:
        return self.dispatcher.has_engine

    @property
    def context_tokens(self) -> int | None:
        """Of the smallest replica, prompt and answer together; None before any has announced itself."""
        return _context_tokens(self._announced())

    def body_limit(self, ordinary_bytes: int) -> int:
        """`ordinary_bytes`, or more if a replica takes more than text in messages."""
        needs = set(MEDIA_NEEDS.values())
        takes = any(needs & upstream.capabilities.offers for upstream in self.spec.upstreams)
        return max(ordinary_bytes, self.spec.max_body_bytes) if takes else ordinary_bytes

    def fit_lanes(self) -> None:
        """Sets what counts as a long request by the replicas' context."""
        queue, tokens = self.flow.queue, long_tokens_of(self.context_tokens)
        queue.lane_rule = replace(queue.lane_rule, long_tokens=tokens)

    def served(self, name: str) -> ServedModel:
        """What parsing a request for `name` needs. Raises `NoEngineAvailable` before any announcement."""
        announced = self._announced()
        context_tokens = _context_tokens(announced)
        if context_tokens is None:
            raise NoEngineAvailable
        vocabulary = announced[0].model.vocabulary
        return ServedModel(
            name,
            context_tokens,
            vocabulary,
            self.spec.is_estimated,
            self.name,
            servers=tuple(
                ServerOffer(upstream.replica_id, upstream.capabilities, takes_turns(upstream))
                for upstream in self.spec.upstreams
            ),
            image_tokens=self.spec.image_tokens,
            sampling=self.spec.sampling,
        )

    def sample_shares(self, now_s: float, wall_s: float) -> None:
        had = self.meters.shares.sample(now_s, self.flow.tenants.all())
        self.meters.flow.sample(now_s, wall_s, had, self.flow.queue.waiting_costs())
        self.meters.engines.sample(now_s, wall_s, self.spec.upstreams)

    def leave_drained(self) -> None:
        """Moves what runs at drained replicas to others."""
        for upstream in self.spec.upstreams:
            if upstream.is_drained:
                self.lifecycle.move_off(upstream)

    def watch_forecasts(self, now_s: float) -> None:
        try:
            self.estimates.watch(now_s)
        except Exception:
            log.exception("the forecasts of %s were not renewed; they go on", self.name)

    def _announced(self) -> list[Ready]:
        return [ready for upstream in self.spec.upstreams if (ready := upstream.ready) is not None]


def _context_tokens(announced: Sequence[Ready]) -> int | None:
    # A KV cache always holds one: an engine whose does not does not start, and one that a request does not
    # fit into all the same says so itself.
    return min((model.model.context_tokens for model in announced), default=None)


class Pools(dict[str, ModelPool]):
    """The pools of a gateway by name, filled once, in the order of the settings."""

    @property
    def first(self) -> ModelPool:
        """The model of our own engine, or the first one."""
        return next(iter(self.values()))

    @property
    def has_engine(self) -> bool:
        return any(pool.has_engine for pool in self.values())

    @property
    def observed(self) -> int:
        """Answers that forecasts have learned from."""
        return sum(pool.estimates.observed for pool in self.values())

    def calibrations(self) -> dict[str, Calibration]:
        return {name: pool.estimates.calibration for name, pool in self.items()}

    def switch_estimates(self) -> bool:
        """Toggles estimates until the next start; returns whether they are on."""
        is_enabled = not self.first.estimates.is_enabled
        for pool in self.values():
            pool.estimates.is_enabled = is_enabled
        return is_enabled

    @property
    def running(self) -> int:
        return sum(pool.lifecycle.running for pool in self.values())

    def begin(self, call: Call) -> Run:
        return self.lifecycle_of(call).begin(call)

    def find(self, request_id: str) -> Run | None:
        runs = (pool.lifecycle.find(request_id) for pool in self.values())
        return next((run for run in runs if run is not None), None)

    def runs_of(self, tenant_id: str | None) -> list[Run]:
        """A tenant's requests, or with None all, the oldest first."""
        runs = [run for pool in self.values() for run in pool.lifecycle.runs_of(tenant_id)]
        return sorted(runs, key=lambda run: run.times.arrived_s)

    def in_flight(self) -> list[tuple[str, str, int]]:
        """Model, name and dispatched requests of every replica. May overcount, never undercounts: a
        request that moved to another replica before its first token counts at both."""
        counts: Counter[tuple[str, str]] = Counter()
        for name, pool in self.items():
            for flight in pool.flow.in_flight:
                counts[name, flight.replica_id] += 1
            for run in pool.lifecycle.runs_of(None):
                if run.turn is not None and run.relocating is not None:  # it is queued for another place
                    counts[name, run.turn.upstream.replica_id] += 1
        return [
            (name, upstream.name, max(counts[name, upstream.replica_id], upstream.running_requests))
            for name, pool in self.items()
            for upstream in pool.spec.upstreams
        ]

    def queued(self) -> list[tuple[str, str, int]]:
        """Model, `queued_as` a tier, and the requests that wait in it."""
        return [
            (name, queued_as(tier), pool.flow.queue.queued_by_tier()[rank])
            for name, pool in self.items()
            for tier, rank in TIER_RANKS.items()
        ]

    def lifecycle_of(self, call: Call) -> Lifecycle:
        return (self[call.pool] if call.pool else self.first).lifecycle

    async def follow_directory(self) -> None:
        followed = await asyncio.gather(
            *(pool.lifecycle.follow_directory() for pool in self.values()), return_exceptions=True
        )
        for failure in followed:
            if failure is not None:
                raise failure

    async def close(self, grace_s: float) -> None:
        await asyncio.gather(*(pool.lifecycle.close(grace_s) for pool in self.values()))


def pools_of(specs: Sequence[PoolSpec]) -> dict[str, PoolSpec]:
    """By name. Raises `ValueError` for duplicate names of pools or replicas."""
    replicas = [upstream.replica_id for spec in specs for upstream in spec.upstreams]
    for names in ([spec.name for spec in specs], replicas):
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is there twice: pools and replicas have names of their own")
    return {spec.name: spec for spec in specs}
