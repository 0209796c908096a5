"""Which values do all parts of `tenants` and its callers speak of?

Plain frozen values: subjects, limits, principals, amounts. No I/O, no decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Tier(StrEnum):
    """Service tiers, first served first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class Meter(StrEnum):
    """What a limit counts."""

    TOTAL_TOKENS = "total_tokens"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    REQUESTS = "requests"
    COST_NANOUSD = "cost_nanousd"
    CONCURRENCY = "concurrency"


class Window(StrEnum):
    """Calendar windows of a limit."""

    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    LIFETIME = "lifetime"


class Mode(StrEnum):
    """What happens when a limit is reached: refuse, alert, or only count."""

    HARD = "hard"
    SOFT = "soft"
    SHADOW = "shadow"


class SubjectKind(StrEnum):
    """Whom a limit binds."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit on one subject. Exactly one shape is set: `window`, or `rate_per_s` with `burst`,
    or (meter CONCURRENCY) neither.

    `amount` is the window's size, the bucket's burst or the concurrency, in units of the meter.
    """

    limit_id: str
    tenant_id: str
    kind: SubjectKind
    subject_id: str
    meter: Meter
    amount: int
    window: Window | None = None
    time_zone: str = "UTC"
    rate_per_s: float | None = None
    mode: Mode = Mode.HARD
    tier: Tier | None = None
    """None: all tiers together."""

    @property
    def is_bucket(self) -> bool:
        """A token bucket: refills at `rate_per_s` up to `amount`."""
        return self.rate_per_s is not None


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of each meter a request holds or has used."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    requests: int = 1

    def of(self, meter: Meter) -> int:
        """The amount that `meter` counts."""
        match meter:
            case Meter.TOTAL_TOKENS:
                return self.input_tokens + self.output_tokens
            case Meter.INPUT_TOKENS:
                return self.input_tokens
            case Meter.OUTPUT_TOKENS:
                return self.output_tokens
            case Meter.REQUESTS:
                return self.requests
            case Meter.COST_NANOUSD:
                return self.cost_nanousd
            case Meter.CONCURRENCY:
                return 1


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking, resolved from an API key, with everything the hot path needs to know of them."""

    tenant_id: str
    tenant_name: str
    project_id: str
    key_id: str
    key_prefix: str
    """The visible part of the key, fit for logs."""
    weight: float
    scopes: frozenset[str]
    default_tier: Tier
    tiers: frozenset[Tier]
    """Tiers the key may use."""
    models: frozenset[str] | None
    """Model names the key may use; None: all."""
    limits: tuple[Limit, ...] = field(default=())
    """Every limit on this key's path: key, project, tenant; all tiers."""

    def limits_for(self, tier: Tier) -> tuple[Limit, ...]:
        """The limits that a request in `tier` must pass."""
        return tuple(limit for limit in self.limits if limit.tier is None or limit.tier == tier)


SCOPES = frozenset({"inference", "quote", "usage:read", "admin:read", "admin:write"})
