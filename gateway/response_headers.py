"""Response headers about limits and about the estimate.

OpenAI's `x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, each from the tightest limit of that meter,
resets as Go writes durations. The IETF's `RateLimit-Policy` and `RateLimit`, structured fields that name
every hard limit (draft-ietf-httpapi-ratelimit-headers-11). Ours: `x-fairgate-*`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from gateway.domain.estimate import Estimate
from tenants.quota.rules import is_platforms
from tenants.quota.store import LimitState
from tenants.types import PLATFORM, TOKEN_METERS, Limit, LimitMode, Meter, Principal, Tier, Window

MAX_POLICIES = 8
"""Limits in the structured fields, the tightest first: headers have to stay small."""
MAX_INTEGER = 10**15 - 1
"""The largest in a structured field (RFC 8941, section 3.3.1)."""
WINDOW_S = {Window.MINUTE: 60, Window.HOUR: 3_600, Window.DAY: 86_400, Window.MONTH: 31 * 86_400}
"""A month as its longest; a lifetime has no window."""
QUOTA_UNITS = {
    Meter.REQUESTS: "requests",
    Meter.CONCURRENCY: "concurrent-requests",
    Meter.COST_NANOUSD: "nano-dollars",
    Meter.GPU_MS: "gpu-milliseconds",
}
"""`requests` and `concurrent-requests` are registered by the draft; the others are ours."""
_ESTIMATE = (
    "wait;p50=%.3f;p90=%.3f, ttft;p50=%.3f;p90=%.3f, latency;p50=%.3f;p90=%.3f, "
    'output-tokens;p50=%d;p90=%d, cost;p50=%d;p90=%d;max=%d, basis="%s";samples=%d%s'
)


def go_duration(seconds: float) -> str:
    """`1s`, `6m0s`, `1h0m30s`, `120ms`, as Go writes them; rounded up."""
    if not math.isfinite(seconds) or seconds <= 0:
        return "0s"
    if seconds < 1:
        milliseconds = math.ceil(seconds * 1000)
        return f"{milliseconds}ms" if milliseconds < 1000 else "1s"
    whole = math.ceil(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, seconds_left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds_left}s"
    return f"{minutes}m{seconds_left}s" if minutes else f"{seconds_left}s"


def rate_limit_headers(states: Iterable[LimitState]) -> dict[str, str]:
    headers: dict[str, str] = {}
    states = [state for state in states if not is_platforms(state.limit)]
    kinds: Sequence[tuple[str, tuple[Meter, ...]]] = (
        ("requests", (Meter.REQUESTS,)),
        ("tokens", TOKEN_METERS),
    )
    counted = [state for state in states if state.limit.mode is not LimitMode.SHADOW]
    for kind, meters in kinds:
        matching = [state for state in counted if state.limit.meter in meters]
        if not matching:
            continue
        tightest = min(matching, key=lambda state: (state.available, -state.reset_s))
        headers[f"x-ratelimit-limit-{kind}"] = str(tightest.limit.amount)
        headers[f"x-ratelimit-remaining-{kind}"] = str(tightest.available)
        headers[f"x-ratelimit-reset-{kind}"] = go_duration(tightest.reset_s)
    return headers


def quota_fields(states: Iterable[LimitState]) -> dict[str, str]:
    """`RateLimit-Policy: "tenant-total_tokens-minute";q=1000;w=60;qu="tokens"` and `RateLimit: …;r=900;t=12`.
    Hard limits only. A token bucket is its burst (`q`) and its refill time (`w`); a `Retry-After` precedes
    `t`. Limits on all tenants together are named, as `"platform";r=0;t=12`, only while full."""
    hard = [state for state in states if state.limit.mode is LimitMode.HARD]
    full = [state for state in hard if is_platforms(state.limit) and not state.available]
    hard = sorted((state for state in hard if not is_platforms(state.limit)), key=tightness)
    policies: list[str] = []
    left: list[str] = []
    if full:
        left.append(f'"{PLATFORM}";r=0{_resets(max(state.reset_s for state in full))}')
    for state in hard[:MAX_POLICIES]:
        name, policy = _policy(state.limit)
        policies.append(policy)
        left.append(f"{name};r={min(state.available, MAX_INTEGER)}{_resets(state.reset_s)}")
    fields = {"ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(left)}
    return {name: value for name, value in fields.items() if value}


def _resets(reset_s: float) -> str:
    return f";t={math.ceil(reset_s)}" if 0 < reset_s < MAX_INTEGER else ""


def tightness(state: LimitState) -> tuple[float, float]:
    """Sort key: smallest share left first, then the last to reset."""
    return state.available / max(1, state.limit.amount), -state.reset_s


@lru_cache(maxsize=4096)
def _policy(limit: Limit) -> tuple[str, str]:
    name = f'"{policy_name(limit)}"'
    window_s = _window_s(limit)
    within = "" if window_s is None else f";w={window_s}"
    unit = QUOTA_UNITS.get(limit.meter, "tokens")
    return name, f'{name};q={min(limit.amount, MAX_INTEGER)}{within};qu="{unit}"'


def policy_name(limit: Limit) -> str:
    """Such as `tenant-concurrency` or `end_user-requests-minute-large_model-above_8000`."""
    shape = limit.window.value if limit.window is not None else "rate" if limit.is_bucket else ""
    tier = "" if limit.tier is None else limit.tier.value
    model = (
        ""
        if limit.model is None
        else "".join(
            letter if (letter.isascii() and letter.isalnum()) or letter in "._" else "_"
            for letter in limit.model
        )
    )
    above = f"above_{limit.above_tokens}" if limit.above_tokens else ""
    return "-".join(part for part in (limit.kind.value, limit.meter.value, shape, tier, model, above) if part)


def _window_s(limit: Limit) -> int | None:
    if limit.window is not None:
        return WINDOW_S.get(limit.window)
    if limit.rate_per_s:
        return min(MAX_INTEGER, max(1, math.ceil(limit.amount / limit.rate_per_s)))
    return None


def limit_headers(states: Iterable[LimitState]) -> dict[str, str]:
    known = list(states)
    return rate_limit_headers(known) | quota_fields(known)


def estimate_headers(estimate: Estimate | None) -> dict[str, str]:
    """Structured (RFC 8941): p50 and p90 in s, tokens, nano-dollars: `wait;p50=0.120;p90=0.480, …`."""
    if estimate is None:
        return {}
    (wait_p50_s, wait_p90_s), (ttft_p50_s, ttft_p90_s) = estimate.wait_s, estimate.ttft_s
    (e2e_p50_s, e2e_p90_s), (tokens_p50, tokens_p90) = estimate.e2e_s, estimate.output_tokens
    cost_p50, cost_p90 = estimate.cost_nanousd
    said = _ESTIMATE % (
        wait_p50_s, wait_p90_s, ttft_p50_s, ttft_p90_s, e2e_p50_s, e2e_p90_s,
        tokens_p50, tokens_p90, cost_p50, cost_p90, estimate.max_cost_nanousd,
        estimate.basis, estimate.samples, ";saturated" if estimate.saturated else "",
    )  # fmt: skip
    return {"x-fairgate-estimate": said}


def contract_headers(principal: Principal, tier: Tier) -> dict[str, str]:
    return {"x-fairgate-tenant": header_safe(principal.tenant_name), "x-fairgate-tier": tier.value}


def header_safe(text: str) -> str:
    """Printable ASCII: a tenant's name may hold any character."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if " " <= character <= "~" else "?" for character in text)
