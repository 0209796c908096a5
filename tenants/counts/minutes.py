"""Counts of one minute: what tenants had of a pool, and what an engine did.

Several gateways count one minute. Tenants' counts are summed; of an engine, which all of them see, the
account of the gateway that saw it longest counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
KEPT_US = 14 * 24 * HOUR_US
"""Older minutes are deleted."""


class FlowKey(NamedTuple):
    """One tenant in one tier of a pool, in one minute (its begin, microseconds since 1970)."""

    minute_us: int
    pool: str
    tier: str
    tenant_id: str


class EngineKey(NamedTuple):
    """One replica in one minute."""

    minute_us: int
    pool: str
    replica: str


@dataclass(slots=True)
class FlowMinute:
    """Counts of one key; service in cost tokens (input + 2 x output)."""

    served_tokens: int = 0
    fair_tokens: int = 0
    """What it would have had under the ideal fair share."""
    waiting_token_s: int = 0
    """Cost tokens that waited in line, each as often as it waited seconds."""
    arrivals: int = 0
    """Requests that lined up."""
    before_line_us: int = 0
    """Their time from the first byte until they lined up, without their tenant's limits."""

    def as_json(self, window_s: int) -> dict[str, Any]:
        """Of a window of `window_s` seconds."""
        mean_us = self.before_line_us / self.arrivals if self.arrivals else 0.0
        return {
            "served_tokens": self.served_tokens,
            "fair_tokens": self.fair_tokens,
            "mean_waiting_tokens": round(self.waiting_token_s / window_s, 1),
            "arrivals": self.arrivals,
            "mean_before_line_s": round(mean_us / 1e6, 6),
        }


@dataclass(slots=True)
class EngineMinute:
    state: str = "down"
    """When it was last looked at: `up` or `down`."""
    seen_us: int = 0
    """For how long the gateway looked at it."""
    up_us: int = 0
    idle_us: int = 0
    """Up, and no step ran."""
    steps: int = 0
    step_us: int = 0
    batch_sum: int = 0
    """Sequences of each step, added up."""
    computed_tokens: int = 0
    """Prompt tokens, recomputed ones not among them."""
    emitted_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    kv_permille_s: int = 0
    """Share of the KV cache in use (thousandths), times seconds."""

    def as_json(self) -> dict[str, Any]:
        steps, seen_s = max(1, self.steps), max(1e-6, self.seen_us / 1e6)
        return {
            "state": self.state,
            "seen_s": round(self.seen_us / 1e6, 3),
            "up_s": round(self.up_us / 1e6, 3),
            "idle_s": round(self.idle_us / 1e6, 3),
            "steps": self.steps,
            "mean_step_s": round(self.step_us / steps / 1e6, 6),
            "mean_batch": round(self.batch_sum / steps, 2),
            "computed_tokens": self.computed_tokens,
            "emitted_tokens": self.emitted_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "preemptions": self.preemptions,
            "kv_share": round(self.kv_permille_s / 1000 / seen_s, 4),
        }


@dataclass(slots=True)
class MinutesCounted:
    """What one gateway counted since it last wrote."""

    flow: dict[FlowKey, FlowMinute] = field(default_factory=dict)
    engines: dict[EngineKey, EngineMinute] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.flow) + len(self.engines)
