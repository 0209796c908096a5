"""Subjects, limits, principals and amounts: frozen values without I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

import msgspec

from tenants.networks import Network


class Tier(StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


class Meter(StrEnum):
    TOTAL_TOKENS = "total_tokens"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    REQUESTS = "requests"
    COST_NANOUSD = "cost_nanousd"
    GPU_MS = "gpu_ms"
    """Milliseconds of the engine's device (GPU or CPU). Known only after a step, so exact to one step."""
    CONCURRENCY = "concurrency"


TOKEN_METERS = (Meter.TOTAL_TOKENS, Meter.INPUT_TOKENS, Meter.OUTPUT_TOKENS)


class Window(StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    LIFETIME = "lifetime"


class LimitMode(StrEnum):
    """What happens when a limit is reached: refuse, alert, or only count."""

    HARD = "hard"
    SOFT = "soft"
    SHADOW = "shadow"


class OnLowBudget(StrEnum):
    """A request whose worst case exceeds the remaining budget is refused, or admitted and cut there."""

    REFUSE = "refuse"
    TRUNCATE = "truncate"


class SubjectKind(StrEnum):
    PLATFORM = "platform"
    """All tenants together."""
    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    END_USER = "end_user"
    """One end user of a tenant, or (`Limit.is_default`) each of them for itself."""


PLATFORM = "platform"
"""Tenant and subject of limits on all tenants together. (Ids of tenants begin with `ten_`.)"""
MAX_END_USER_CHARS = 64
"""As OpenAI has it for `safety_identifier` and `user`."""


@lru_cache(maxsize=16_384)
def end_user_id(tenant_id: str, name: str) -> str:
    """The subject of limits on a tenant's end user: a digest, so that equal names of two tenants differ."""
    packed = f"{tenant_id}\0{name}".encode("utf-8", "surrogatepass")
    return f"usr_{hashlib.blake2b(packed, digest_size=16).hexdigest()}"


DEFAULT_THRESHOLDS = (80, 100)
"""Per cent of a soft limit's amount at which it alerts."""


@dataclass(frozen=True, slots=True)
class Override:
    """A temporary amount of a limit."""

    amount: int
    rate_per_s: float | None
    """Token buckets only; None: the limit's own."""
    until_us: int
    """Exclusive; microseconds since 1970."""
    reason: str


def scale_of(meter: Meter) -> int:
    """Fractions of a unit in a bucket's level, so that the largest stays below 2**53."""
    return 1_000 if meter is Meter.COST_NANOUSD else 1_000_000


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit on one subject, of one shape: `window`, or `rate_per_s` with `burst`, or (meter CONCURRENCY)
    neither. `amount` is the window's size, the bucket's burst or the concurrency, in units of the meter."""

    limit_id: str
    tenant_id: str
    kind: SubjectKind
    subject_id: str
    meter: Meter
    amount: int
    window: Window | None = None
    time_zone: str = "UTC"
    rate_per_s: float | None = None
    mode: LimitMode = LimitMode.HARD
    tier: Tier | None = None
    """None: all tiers together."""
    thresholds: tuple[int, ...] = ()
    """Soft limits: alert thresholds in per cent of the amount, ascending."""
    model: str | None = None
    """None: all models together."""
    above_tokens: int = 0
    """It binds only requests of more tokens, prompt and longest possible answer together; 0: all."""
    end_user: str = ""
    """The name of the end user that it is set on; empty: another kind, or the default of each end user."""
    override: Override | None = None
    """Applied by `at` until it expires."""
    created_us: int = field(compare=False, default=0)
    """When it was first set; 0: not known. What ended before was not counted on it."""
    ceiling_per_s: float | None = None
    """Buckets of tier batch: refill with spare capacity (`tenants/quota/spare.py`); None: never faster."""
    identity: str = field(init=False, compare=False, repr=False, default="")
    """Key of its usage: subject, meter, shape, tier, model and size of request; not the amount."""
    is_bucket: bool = field(init=False, compare=False, repr=False, default=False)
    scale: int = field(init=False, compare=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_bucket", self.rate_per_s is not None)
        object.__setattr__(self, "scale", scale_of(self.meter))
        if self.window is not None:
            shape = f"{self.window.value}/{self.time_zone}"
        else:
            shape = "bucket" if self.is_bucket else "concurrency"
        tier = self.tier.value if self.tier is not None else "*"
        identity = f"{self.kind.value}:{self.subject_id}:{self.meter.value}:{shape}:{tier}"
        if self.model is not None:
            # A digest: a model's name may hold any character, and the ledger's column is bounded.
            identity += f":m={_model_digest(self.model)}"
        if self.above_tokens:
            identity += f":above={self.above_tokens}"
        object.__setattr__(self, "identity", identity)

    def __hash__(self) -> int:
        # Equal limits have the same identity, and a string caches its hash.
        return hash(self.identity)

    @property
    def follows_spare_capacity(self) -> bool:
        """Whether it may refill faster than by its rate."""
        return self.ceiling_per_s is not None

    @property
    def is_default(self) -> bool:
        """Whether it is the default of a tenant's end users, each of whom has a counter of its own."""
        return self.kind is SubjectKind.END_USER and self.subject_id == self.tenant_id

    def of_end_user(self, subject_id: str) -> Limit:
        """This default as the limit of one end user."""
        return replace(self, subject_id=subject_id)

    def binds(self, request: RequestTraits) -> bool:
        return (
            (self.tier is None or self.tier == request.tier)
            and (self.model is None or self.model == request.model)
            and (not self.above_tokens or request.tokens > self.above_tokens)
        )

    def at(self, now_s: float) -> Limit:
        """The limit in force at `now_s` (seconds since 1970), with an unexpired override applied; one that
        says a rate has no ceiling. The result has no override, so do not keep it."""
        override = self.override
        if override is None:
            return self
        if now_s * 1e6 >= override.until_us:
            return replace(self, override=None)
        if override.rate_per_s is None:
            return replace(self, amount=override.amount, override=None)
        # An override with a rate means that rate, whatever capacity is spare.
        return replace(
            self,
            amount=override.amount,
            rate_per_s=override.rate_per_s,
            ceiling_per_s=None,
            override=None,
        )


@lru_cache(maxsize=1_024)
def _model_digest(model: str) -> str:
    return hashlib.blake2b(model.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class RequestTraits(msgspec.Struct, frozen=True):
    tier: Tier
    model: str
    tokens: int
    """Prompt and longest possible answer, all its sequences together."""
    end_user: str = ""
    """The name that the request gives to its end user; empty: none."""


class Amounts(msgspec.Struct, frozen=True):
    """What a request holds or has used, by meter: weighted tokens for limits, real ones for bills, usage."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    requests: int = 1
    gpu_ms: int = 0

    def of(self, meter: Meter) -> int:
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
            case Meter.GPU_MS:
                return self.gpu_ms
            case Meter.CONCURRENCY:
                return 1


NOTHING = Amounts(requests=0)
"""Zero of everything, requests included."""


Labels = Mapping[str, tuple[str, ...]]
"""Labels that a tenant has declared: keys of a request's `metadata`, each with the values it may have."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller, resolved from an API key, with everything the hot path needs."""

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
    models: frozenset[str] | None
    """Model names the key may use; None: all."""
    limits: tuple[Limit, ...] = field(default=())
    """Every limit on the key's path: key, project, tenant, end users, platform; overrides not applied."""
    on_low_budget: OnLowBudget = OnLowBudget.REFUSE
    reserved_tokens_per_s: float = 0.0
    """Service that its tenant gets before all others, in cost tokens (input + 2 x output); 0: none."""
    reserved_tier: Tier | None = None
    """The tier that this is for; None: all."""
    allow_from: tuple[Network, ...] = ()
    """Networks that the key may be used from; empty: anywhere."""
    labels: Labels = field(default_factory=dict, hash=False)

    @property
    def ids(self) -> tuple[str, str, str]:
        return self.tenant_id, self.project_id, self.key_id

    def limits_for(self, request: RequestTraits, now_s: float) -> tuple[Limit, ...]:
        """The limits on a request, as in force at `now_s` (seconds since 1970); the tenant's default for end
        users as that of the request's end user, unless that one has its own."""
        by_identity: dict[str, Limit] = {}
        for limit in self.limits:
            if not limit.binds(request):
                continue
            in_force = limit.at(now_s)
            if limit.kind is SubjectKind.END_USER:
                if not request.end_user:
                    continue
                user = end_user_id(self.tenant_id, request.end_user)
                if limit.is_default:
                    in_force = in_force.of_end_user(user)
                    if in_force.identity in by_identity:
                        continue
                elif limit.subject_id != user:
                    continue
            by_identity[in_force.identity] = in_force
        return tuple(by_identity.values())


SCOPES = frozenset({"inference", "quote", "usage:read", "admin:read", "admin:write"})
