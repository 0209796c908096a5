"""Figures of token-fair decoding, from a server's log of steps: `GET /admin/v1/policy?steps=N`. Pure.

Each step is a mapping with the fields of `engine.messages.StepRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from engine.scheduling.compose.auto_slots import fair_pair

Step = Mapping[str, Any]


def merged(known: Sequence[Step], read: Iterable[Step]) -> list[Step]:
    """In order, with steps read twice kept once."""
    by_number = {step["step"]: step for step in (*known, *read)}
    return [by_number[number] for number in sorted(by_number)]


def decoding(step: Step) -> int:
    """Sequences that decode, those without a token in this step included."""
    counts: list[int] = [*step["decodes"].values(), *step["waiting_decodes"].values()]
    return sum(counts)


def lost_steps(steps: Sequence[Step]) -> int:
    """Steps that the log had dropped before they were read."""
    return steps[-1]["step"] - steps[0]["step"] + 1 - len(steps) if steps else 0


def after_prompts(steps: Sequence[Step], settle_steps: int) -> list[Step]:
    """The steps that come more than `settle_steps` after the last one that computed a prompt."""
    last = max((number for number, step in enumerate(steps) if step["prompts"]), default=-1)
    return list(steps[last + 1 + settle_steps :])


def worst_ratio(
    steps: Sequence[Step], light: str, heavy: str, wanted: float | Sequence[tuple[float, float]], window: int
) -> float:
    """Largest relative deviation of heavy / light decode tokens from `wanted` (a ratio, or each step's light
    and heavy tokens) in any window of `window` steps. Raises ValueError for fewer steps."""
    if len(steps) < window:
        raise ValueError(f"{len(steps)} steps are fewer than a window of {window}")
    sums = {
        tenant: list(accumulate((step["decodes"].get(tenant, 0) for step in steps), initial=0))
        for tenant in (light, heavy)
    }
    pairs = [(1.0, wanted)] * len(steps) if isinstance(wanted, float) else wanted
    ideal = [list(accumulate((pair[place] for pair in pairs), initial=0.0)) for place in (0, 1)]
    worst = 0.0
    for start in range(len(steps) - window + 1):
        gained = {tenant: total[start + window] - total[start] for tenant, total in sums.items()}
        if not gained[light]:
            return float("inf")
        due = [total[start + window] - total[start] for total in ideal]
        worst = max(worst, abs(gained[heavy] / gained[light] / (due[1] / due[0]) - 1))
    return worst


def max_min(steps: Sequence[Step], streams: int, weight: float) -> list[tuple[float, float]]:
    """Each step's tokens of two tenants of weights 1 and `weight`, `streams` each, by max-min sharing."""
    return [fair_pair(streams, streams, weight, min(step["slots"], 2 * streams)) for step in steps]


def longest_gap(steps: Sequence[Step], tenant: str) -> int:
    return max((step["longest_gap_steps"].get(tenant, 0) for step in steps), default=0)


def most_rounds(sequences: int, slots: int, weight: float, weights: float) -> int:
    """Steps in which every sequence of a tenant has had a turn; one more, for slots that do not divide."""
    return -(-sequences * round(1000 * weights) // round(1000 * slots * weight)) + 1


def both_work(steps: Sequence[Step], one: str, other: str) -> list[Step]:
    def works(step: Step, tenant: str) -> bool:
        return any(step[field].get(tenant) for field in ("decodes", "prompts", "waiting_prompt_tokens"))

    return [step for step in steps if works(step, one) and works(step, other)]


def least_surplus(steps: Sequence[Step], tenant: str, part: float) -> float:
    """The tenant's tokens less its `part` of all tokens, summed from the first step: the smallest value."""
    surplus, least = 0.0, 0.0
    for step in steps:
        own = step["decodes"].get(tenant, 0) + step["prompts"].get(tenant, 0)
        whole = sum(step["decodes"].values()) + sum(step["prompts"].values())
        surplus += own - part * whole
        least = min(least, surplus)
    return least


def idle_tokens(steps: Sequence[Step], tenant: str) -> int:
    """Tokens that steps left over although a prompt of the tenant was unfinished."""
    return sum(step["left_tokens"] for step in steps if step["waiting_prompt_tokens"].get(tenant))


def without_token(steps: Sequence[Step], tenant: str) -> int:
    """How often a decoding sequence of the tenant had no token in a step."""
    return sum(step["waiting_decodes"].get(tenant, 0) for step in steps)


def not_begun(steps: Sequence[Step], tenant: str) -> int:
    """How often a sequence of the tenant was in the engine and still waited after a step."""
    return sum(step["waiting"].get(tenant, 0) for step in steps)
