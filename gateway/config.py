"""Which knobs does the gateway have, and which values make sense?"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from tenants.types import Tier


def _default_ttl() -> dict[Tier, float]:
    # The SDK's own read timeout is 600 s: a refusal must come well before it.
    return {Tier.INTERACTIVE: 120.0, Tier.STANDARD: 300.0, Tier.BATCH: 540.0}


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of one gateway process. Raises `ValueError` naming the field when one makes no sense."""

    policy: str = "vtc"
    """Scheduling policy of the queue, by its name in `engine.scheduling.policy.POLICIES`."""
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
    lookahead_sequences: int = 2
    """Sequences dispatched beyond what an engine runs at once, so that it never idles between steps."""
    kv_window: float = 1.0
    """Predicted KV tokens in flight may be this share of an engine's KV capacity."""
    engine_grace_s: float = 15.0
    """How long queued requests wait for an engine that is gone before they are refused."""
    dispatch_log_records: int = 20_000

    lease_ttl_s: float = 60.0
    """A hold in the quota store outlives its gateway by at most this."""
    outcome_wait_s: float = 10.0
    """After a cancel: how long the engine's final count is awaited before the received count is charged."""
    settle_wait_s: float = 10.0
    """How long an answer waits for its settlement to be durable; the settlement itself goes on."""
    write_timeout_s: float = 120.0
    """A client that reads nothing for so long counts as disconnected."""
    keep_alive_s: float = 5.0
    """Silence in a stream after which an SSE comment is sent."""
    shutdown_grace_s: float = 20.0
    """How long running requests may go on when the gateway stops."""
    estimate_cache_s: float = 0.05
    quotes_per_s: float = 5.0
    """`POST /v1/quotes` per key, sustained; bursts of twice that."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            lowest = 0 if item.name in _MAY_BE_ZERO else None
            if value != value or value < 0 or (lowest is None and value == 0):
                raise ValueError(f"{item.name} must be a positive number, not {value!r}")
        if set(self.queue_ttl_s) != set(Tier) or any(not ttl > 0 for ttl in self.queue_ttl_s.values()):
            raise ValueError("queue_ttl_s needs a positive number of seconds for each of " + ", ".join(Tier))


_MAY_BE_ZERO = frozenset({"lookahead_sequences", "shutdown_grace_s", "estimate_cache_s"})
