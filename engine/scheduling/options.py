"""Numeric options of policies, with their bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from engine.scheduling.batch_or_wait.wait_table import WaitTable

MOST_TOKENS = 1 << 24
MOST_SECONDS = 3600.0
MOST_PROMPTS = 4096

_BOUNDS: dict[str, tuple[float, float]] = {
    "max_num_partial_prefills": (1, MOST_PROMPTS),
    "max_long_partial_prefills": (1, MOST_PROMPTS),
    "long_prefill_token_threshold": (0, MOST_TOKENS),
    "long_chunk_permille": (1, 1000),
    "target_step_s": (0, MOST_SECONDS),
    "least_chunk_tokens": (1, MOST_TOKENS),
    "batch_size": (0, 4096),
    "window_s": (0, MOST_SECONDS),
    "reserve_permille": (0, 1000),
    "small_lane_permille": (0, 500),
    "peak_quantile_permille": (500, 1000),
    "peak_jump_permille": (0, 500),
    "peak_headroom_permille": (0, 500),
    "bucket_ratio": (1.1, 16),
    "suspend_after_s": (0, MOST_SECONDS),
    "longest_pause_s": (0, MOST_SECONDS),
    "slots": (0, MOST_TOKENS),
    "cap_tokens": (1, MOST_TOKENS),
    "ttft_target_s": (0, MOST_SECONDS),
    "tpot_target_s": (0, MOST_SECONDS),
}


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Everything that can be set; a policy uses what its choices know.

    Raises ValueError naming the field, its bounds and the value.
    """

    admit: str = ""
    """Another admit choice than the policy's own, by name; empty: its own. So with the next two."""
    compose: str = ""
    evict: str = ""
    max_num_partial_prefills: int | None = None
    """Prompts that may be unfinished after a step that advanced them. None: the policy's own, mostly 1."""
    max_long_partial_prefills: int = 1
    """Long ones among them, at most."""
    long_prefill_token_threshold: int = 0
    """A prompt is long above it, and a step takes at most that many of its tokens. 0: with one partial prompt
    at a time no prompt is long; with several, 4 % of the model's length."""
    long_chunk_permille: int | None = None
    """Part of the threshold that a step takes of a long prompt. None: the policy's own, mostly 1,000."""
    target_step_s: float | None = None
    """Prompts get only what keeps a step's predicted time below it. 0: no limit; None: the policy's own."""
    least_chunk_tokens: int = 16
    """Prompt tokens that go into each step, whatever the target."""
    batch_size: int = 0
    """Of a batch that runs to completion. 0: as many as there are places."""
    window_s: float = 0.05
    """How long such a batch waits for more."""
    reserve_permille: int = 500
    """Part of the predicted remaining output for which memory is set aside at admission."""
    small_lane_permille: int | None = None
    """Part of the cache that large sequences leave free for small ones, and that small ones may take of what
    large ones are promised. None: the policy's own, mostly 0."""
    peak_quantile_permille: int = 600
    """Quantile of the remaining output that the peak test goes by."""
    peak_jump_permille: int = 200
    """By how much a preemption raises it."""
    peak_headroom_permille: int = 0
    """Part of the cache that the peak test leaves free."""
    bucket_ratio: float = 2.0
    """Longest to shortest sequence of a length bucket."""
    suspend_after_s: float = 0.5
    """How long a short one waits before it suspends a batch of long ones."""
    longest_pause_s: float = 5.0
    """After so long no more short ones go before suspended ones."""
    slots: int = 0
    """Decode tokens that a step of the token-fair composition hands out at most; 0: what its tokens allow."""
    cap_tokens: int = 256
    """Tokens of one prompt that a step of it takes at most."""
    ttft_target_s: float = 0.0
    """When the first token is due, where the request does not say (the composition `slack`). 0: no target."""
    tpot_target_s: float = 0.0
    """When each further token is due, likewise."""
    batch_or_wait_table: WaitTable | None = None
    """What the admit choice `table` looks up."""

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isfinite(value) or not least <= value <= most:
                raise ValueError(f"{name} must be between {least:g} and {most:g}, not {value}")
        if self.max_long_partial_prefills > (self.max_num_partial_prefills or MOST_PROMPTS):
            raise ValueError(
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) must not exceed "
                f"max_num_partial_prefills ({self.max_num_partial_prefills})"
            )

    def changed(self) -> dict[str, Any]:
        """What differs from the defaults, for people and for JSON."""
        values = {option.name: (getattr(self, option.name), option.default) for option in fields(self)}
        changed = {name: value for name, (value, default) in values.items() if value != default}
        if "batch_or_wait_table" in changed:
            changed["batch_or_wait_table"] = type(self.batch_or_wait_table).__name__
        return changed
