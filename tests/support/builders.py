"""Messages and records with defaults: a test says of them only what matters for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry

from engine.messages import SamplingParams, StepTime, Submit
from engine.scheduling.counters import ServiceCounters
from gateway.background import Site
from gateway.config import GatewayConfig
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate
from gateway.flow.controller import FlowController
from gateway.flow.knobs import QueueSettings
from gateway.flow.placement import Scorer
from gateway.flow.window import WindowRule
from tenants.types import Principal, Tier

if TYPE_CHECKING:
    from engine.core.sequence_table import SequenceTable


Controller = TypeVar("Controller", bound=FlowController)


def submit(name: str = "s", *, max_tokens: int = 10, **fields: Any) -> Submit:
    """A sequence, and a request of the same name; its lease covers all its tokens."""
    values: dict[str, Any] = {
        "sequence_id": name, "request_id": name, "tenant_id": "t", "prompt_token_ids": [5, 6, 7],
        "max_tokens": max_tokens, "lease_tokens": max_tokens,
    }  # fmt: skip
    return Submit(**(values | fields))


def step_time(base_s: float = 0.0, per_token_s: float = 0.0, **fields: Any) -> StepTime:
    """All parts that are not named are 0."""
    rest = {"per_context_token_s": 0.0, "per_sequence_s": 0.0, "samples": 0, "relative_error": 0.0}
    return StepTime(base_s, per_token_s, **(rest | fields))


def flow_controller(
    order: str = "vtc",
    counters: ServiceCounters | None = None,
    *,
    lookahead: int = 0,
    kind: type[Controller] = FlowController,  # type: ignore[assignment]
    scorer: Scorer | None = None,
    **fields: Any,
) -> Controller:
    """A queue that is never full and that no request leaves for the time that it waited, but for `fields`."""
    settings = QueueSettings(10_000, 10_000, [1e9] * 3, WindowRule(lookahead, 1.0), 10)
    counters = ServiceCounters() if counters is None else counters
    return kind(order, counters, replace(settings, **fields), scorer)


def site(
    database: Any,
    wall_clock: Callable[[], float] = time.time,
    registry: CollectorRegistry | None = None,
    gateway_id: str = "gw",
    **settings: Any,
) -> Site:
    return Site(
        gateway_id=gateway_id, database=database, wall_clock=wall_clock, config=GatewayConfig(**settings),
        prometheus=CollectorRegistry() if registry is None else registry,
    )  # fmt: skip


def principal(tenant: str = "ten_1", **fields: Any) -> Principal:
    """May use everything, without limits."""
    values: dict[str, Any] = {
        "tenant_id": tenant,
        "tenant_name": "acme",
        "project_id": "prj_1",
        "key_id": "key_1",
        "key_prefix": "fg_live_x",
        "weight": 1.0,
        "scopes": frozenset({"inference"}),
        "default_tier": Tier.STANDARD,
        "tiers": frozenset(Tier),
        "models": None,
    }
    return Principal(**(values | fields))


def call(**fields: Any) -> Call:
    """A streamed chat of one choice."""
    values: dict[str, Any] = {
        "request_id": "req_1",
        "chat": True,
        "model": "m",
        "principal": principal(),
        "tier": Tier.STANDARD,
        "prompts": ([1] * 10,),
        "choices": 1,
        "max_tokens": 40,
        "sampling": SamplingParams(),
        "stream": True,
        "include_usage": True,
        "created": 1,
    }
    return Call(**(values | fields))


def estimate(**fields: Any) -> Estimate:
    """Median and 90th percentile of each figure, from a replay."""
    values: dict[str, Any] = {
        "wait_s": (5.0, 9.0),
        "ttft_s": (6.0, 10.0),
        "tpot_s": (0.1, 0.2),
        "e2e_s": (9.0, 20.0),
        "output_tokens": (10, 40),
        "cost_nanousd": (1, 2),
        "max_cost_nanousd": 3,
        "tokens_ahead": {},
        "basis": "replay",
        "samples": 1,
        "saturated": False,
    }
    return Estimate(**(values | fields))


def virtual_prompt(name: str, tokens: int) -> list[int]:
    """A prompt of `tokens` tokens, unique to `name` from its start, so that no cached prefix matches."""
    drawn = Random(name)
    start = [drawn.randrange(1, 1024) for _ in range(3)]
    return (start + [1] * tokens)[:tokens]


def set_counter(table: SequenceTable, tenant_id: str, value: int) -> None:
    """As a sequence does that brings its tenant's counter."""
    table.charges.set(tenant_id, value)
    table.waiting.unlift(tenant_id)
