"""Which knobs does the gateway have, and which values make sense?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from engine.scheduling.options import PolicyOptions
from gateway.flow.control_rules import ControlMode
from tenants.types import Tier


def _default_ttl() -> dict[Tier, float]:
    # The SDK's own read timeout is 600 s: a refusal must come well before it.
    return {Tier.INTERACTIVE: 120.0, Tier.STANDARD: 300.0, Tier.BATCH: 540.0}


def _default_ageing() -> dict[Tier, float]:
    # Each tier moves up well before its requests leave the queue.
    return {Tier.INTERACTIVE: math.inf, Tier.STANDARD: 150.0, Tier.BATCH: 180.0}


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of one gateway process. Raises `ValueError` naming the field when one makes no sense."""

    policy: str = "vtc"
    """Scheduling policy of the queue, by its name in `engine.scheduling.policy`."""
    policy_options: PolicyOptions = field(default_factory=PolicyOptions)
    """With the batch-or-wait table, where there is one: the queue needs no more of it than the engines."""
    data_dir: Path | None = None
    """Where the length forecast is kept between runs; None: it is not kept."""

    max_body_bytes: int = 1024 * 1024
    body_timeout_s: float = 30.0
    max_messages: int = 2048
    max_prompts: int = 16
    """Prompts in one `/v1/completions` request."""
    max_choices: int = 8
    """`n`."""
    max_stop_strings: int = 4
    max_stop_characters: int = 128
    max_top_logprobs: int = 20
    max_logit_bias: int = 1024

    max_queued: int = 2048
    max_queued_per_tenant: int = 512
    queue_ttl_s: dict[Tier, float] = field(default_factory=_default_ttl)
    """Longest wait in the queue by tier; a request that waited longer is refused with 503."""
    ageing_s: dict[Tier, float] = field(default_factory=_default_ageing)
    """By tier: a request that has waited so long moves up one tier, and again after as long; inf: never."""
    long_tokens: int = 16_384
    """Requests with more tokens than this (input + predicted output) wait in a lane of their own."""
    long_share_sequences: float = 0.5
    """Share of an engine's sequences that the long requests of a tier may hold."""
    long_share_kv: float = 0.5
    """And of its KV cache."""
    batch_share: float = 1.0
    """Share of an engine's sequences and KV cache that the batch tier may hold."""
    reservation_burst_s: float = 10.0
    """A tenant that was kept from its reserved service is owed at most so many seconds of it."""
    lookahead_sequences: int = 2
    """Sequences dispatched beyond what an engine runs at once, so that it never idles between steps."""
    kv_window: float = 1.0
    """Predicted KV tokens in flight may be this share of an engine's KV capacity."""
    engine_grace_s: float = 15.0
    """How long queued requests wait for an engine that is gone before they are refused."""
    dispatch_log_records: int = 20_000

    reserve_quantile: float = 0.9
    """Of the predicted output, held before a request runs; more is held while it decodes."""
    hold_wait_s: float = 5.0
    """A top-up waits so long for what other requests hold on a window before it counts as refused."""
    accounts_wait_s: float = 30.0
    """A running request waits so long for a quota store or ledger that is away before it is stopped."""
    lease_ttl_s: float = 60.0
    """A hold in the quota store outlives its gateway by at most this."""
    gateway_stale_s: float = 15.0
    """A gateway whose heartbeat is older than this is taken for dead, and others settle what it left."""
    outcome_wait_s: float = 10.0
    """After a cancel: how long the engine's final count is awaited before the received count is charged."""
    settle_wait_s: float = 10.0
    """How long an answer waits for its settlement to be durable; the settlement itself goes on."""
    write_timeout_s: float = 120.0
    """A client that reads nothing for so long counts as disconnected."""
    max_buffered_events: int = 512
    """Pieces of an answer that wait for their reader before the engine is slowed down."""
    slow_reader_s: float = 30.0
    """A client that leaves that buffer full for so long is cut; what was generated is charged."""
    keep_alive_s: float = 5.0
    """Silence in a stream after which an SSE comment is sent."""
    idempotency_ttl_s: float = 86_400.0
    """How long the answer to a request with an `Idempotency-Key` is kept; 0: such requests are refused."""
    idempotency_wait_s: float = 300.0
    """A repeat waits so long for a run that has not ended."""
    max_idempotent_answer_bytes: int = 1024 * 1024
    max_idempotency_keys: int = 10_000
    """Of one API key, at any time."""
    shutdown_grace_s: float = 20.0
    """How long running requests may go on when the gateway stops."""
    timeline_retention_s: float = 7 * 86_400.0
    """How long the timelines of requests that have ended are kept; 0: none is."""
    max_timelines: int = 1_000_000
    """The oldest go first."""
    estimates: bool = True
    """Whether requests get a forecast of what they will wait, take and cost."""
    estimate_cache_s: float = 0.05
    quotes_per_s: float = 5.0
    """`POST /v1/quotes` per key, sustained; bursts of twice that."""
    control: ControlMode = ControlMode.OFF
    """Whether the control loop moves knobs, or says how it would."""
    quote_valid_s: float = 10.0
    """For so long a quote can be redeemed."""
    quote_credit_share: float = 0.5
    """Of the charge, credited where a redeemed quote was not kept and that is ours."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            lowest = 0 if item.name in _MAY_BE_ZERO else None
            if value != value or value < 0 or (lowest is None and value == 0):
                raise ValueError(f"{item.name} must be a positive number, not {value!r}")
        if self.reserve_quantile > 1:
            raise ValueError(f"reserve_quantile must be at most 1, not {self.reserve_quantile!r}")
        if self.quote_credit_share > 1:
            raise ValueError(f"quote_credit_share must be at most 1, not {self.quote_credit_share!r}")
        for name in ("long_share_sequences", "long_share_kv", "batch_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, not {getattr(self, name)!r}")
        if set(self.ageing_s) != set(Tier) or any(not seconds > 0 for seconds in self.ageing_s.values()):
            raise ValueError(
                "ageing_s needs a positive number of seconds (inf: never) for each of " + ", ".join(Tier)
            )
        if set(self.queue_ttl_s) != set(Tier) or any(not ttl > 0 for ttl in self.queue_ttl_s.values()):
            raise ValueError("queue_ttl_s needs a positive number of seconds for each of " + ", ".join(Tier))


_MAY_BE_ZERO = frozenset(
    {
        "idempotency_ttl_s",
        "lookahead_sequences",
        "quote_credit_share",
        "reservation_burst_s",
        "shutdown_grace_s",
        "estimate_cache_s",
        "timeline_retention_s",
    }
)
