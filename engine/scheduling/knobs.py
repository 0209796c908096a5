"""Knobs of a running engine: numbers of a policy's choices, turned between two steps.

The choices stay the objects that they are: nothing waits anew, and no counter begins again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.messages import EngineKnobs
from engine.scheduling.options import AUTO, MOST_PROMPTS, PolicyOptions
from engine.scheduling.policy import Policy, make_policy


def check_knobs(knobs: EngineKnobs) -> None:
    """Raises ValueError naming the knob, its bounds and the value."""
    for name in ("token_share", "slot_share"):
        # "not": refuses NaN, too.
        if not 0 < getattr(knobs, name) <= 1:
            raise ValueError(f"{name} is a share above 0 and at most 1, not {getattr(knobs, name)}")
    for name, least, most in (("partial_prefills", 1, MOST_PROMPTS), ("reserve_permille", 0, 1000)):
        value = getattr(knobs, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} must be between {least} and {most}, not {value}")


def turned_options(options: PolicyOptions, knobs: EngineKnobs, max_sequences: int) -> PolicyOptions:
    """The options as the knobs say. Raises ValueError for a knob beyond its bounds."""
    check_knobs(knobs)
    changes: dict[str, Any] = {}
    if knobs.slot_share < 1:
        slots = max(1, round(knobs.slot_share * max_sequences))
        # `auto` goes on beside a knob: `TokenFair.turned` keeps it.
        is_free = options.slots in (AUTO, 0)
        changes["slots"] = slots if is_free else min(slots, int(options.slots))
    if knobs.partial_prefills is not None:
        changes["max_num_partial_prefills"] = knobs.partial_prefills
        changes["max_long_partial_prefills"] = min(options.max_long_partial_prefills, knobs.partial_prefills)
    if knobs.reserve_permille is not None:
        changes["reserve_permille"] = knobs.reserve_permille
    return replace(options, **changes)


def turned(policy: Policy, knobs: EngineKnobs, max_sequences: int) -> Policy:
    """The policy with its choices as the knobs say, stateful ones the same objects. Raises ValueError."""
    fresh = make_policy(policy.name, turned_options(policy.options, knobs, max_sequences))
    return replace(
        policy, admit=policy.admit.turned(fresh.admit), compose=policy.compose.turned(fresh.compose)
    )
