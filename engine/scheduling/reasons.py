"""Reasons of scheduling decisions in words, and what each policy is made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.entry import COUNTER_SCALE
from engine.messages import TIER_RANKS

Word = Callable[[float], str]

TIER_NAMES = {rank: name for name, rank in TIER_RANKS.items()}


def _arrival(value: float) -> str:
    return f"earliest arrival ({value:,.3f} s on the engine's clock)"


def _ratio(value: float) -> str:
    return f"highest response ratio ({-value:,.2f})"


def _counter(value: float) -> str:
    return f"least served tenant (counter {value / COUNTER_SCALE:,.0f} per weight)"


def _round(value: float) -> str:
    return f"the tenant's round ({value:,.0f})"


def _bucket(value: float) -> str:
    return "its length bucket is in turn" if value == 0 else "its length bucket is not in turn"


WORDS: Mapping[str, tuple[Word, ...]] = {
    "fcfs": (_arrival,),
    "hrrn": (_ratio,),
    "sjf": (lambda value: f"fewest predicted tokens, aged ({value:,.0f})",),
    "srpt": (lambda value: f"fewest predicted tokens left, aged ({value:,.0f})",),
    "las": (lambda value: f"least attained service ({value:,.0f} tokens)",),
    "mlfq": (lambda value: f"highest level ({value:.0f})",),
    "priority": (lambda value: f"smallest score of tier, urgency, history and length ({value:,.0f})",),
    "edf": (lambda value: f"earliest deadline ({value:,.3f} s on the engine's clock)",),
    "drr": (_round, _arrival),
    "dlpm": (_round, _arrival),
    "vtc": (_counter, _arrival),
    "hybrid": (_counter, _ratio),
    "buckets": (_bucket, _arrival),
}
"""By order: a word for each number of its rank after the tier's."""


def reason(rule: str, rank: Sequence[float]) -> str:
    """Why a sequence was first: `tier standard; then least served tenant (...)`; without a rank, its rule."""
    order = rule.removeprefix("order ").partition(",")[0]
    words = WORDS.get(order)
    if not rank or words is None or len(rank) - 1 > len(words):
        return ""
    tier = int(rank[0])
    parts = [f"tier {TIER_NAMES.get(tier, tier)}"]
    return "; then ".join(parts + [word(value) for word, value in zip(words, rank[1:], strict=False)])


PURPOSES: Mapping[str, tuple[str, str]] = {
    "static": (
        "nothing: the oldest way to batch, kept as the honest baseline. No sequence's tokens wait for a"
        " newcomer's prompt",
        "answers differ in length: the batch lasts as long as its longest member",
    ),
    "dynamic": (
        "clumps of requests that arrive together: a window catches them in one batch",
        "as static; and at low load the window and the running batch only add delay",
    ),
    "buckets": (
        "padded shapes and unlike prompts: a step computes like prompts only",
        "nothing is padded: cutting steps short is a loss",
    ),
    "fcfs": (
        "no request is overtaken: the longest wait is short",
        "a long prompt is ahead of many short ones; one tenant floods all others",
    ),
    "hrrn": (
        "short prompts behind long ones, without any prediction",
        "answers differ more than prompts: it does not see them",
    ),
    "sjf": (
        "mean latency when predictions are good",
        "predictions are noise; ageing bounds what that costs",
    ),
    "srpt": (
        "as sjf, and newcomers need not wait for a long one to end",
        "an interrupted stream stalls, and holds KV or loses it and computes it again",
    ),
    "las": (
        "heavy tails without a predictor",
        "all are alike: they share the machine and all end late",
    ),
    "mlfq": (
        "levels of doubling quanta: as las, and none starves",
        "memory is short: many half-done ones hold it, and what they lose is computed again",
    ),
    "priority": (
        "urgent requests among patient ones",
        "there is more urgent work than the machine can do: the patient ones wait it out",
    ),
    "edf": (
        "deadlines that can all be met",
        "they cannot: it works on those that are late already, and the rest become late, too",
    ),
    "drr": (
        "tenants with prefixes of their own: turns of one tenant hit its cache",
        "fairness in the small counts: a turn is a quantum",
    ),
    "dlpm": (
        "many prefixes in little memory: drr, longest prefix match inside a tenant",
        "fairness in the small counts, as with drr",
    ),
    "vtc": (
        "a calm tenant beside a flood; service divided by weight",
        "tenants differ in context: tokens are shared equally, KV memory is not",
    ),
    "hybrid": (
        "short requests among long ones, fair between tenants",
        "requests are long: their prompts advance in smaller chunks, and small ones go past them for memory",
    ),
    "learned": (
        "a load whose kinds come again: the knobs rest where a table says that was fitted on it",
        "the load is another than the one that the table was fitted on; far from it this is hybrid",
    ),
    "table": (
        "batches that begin and wait as a table says that was solved for the load",
        "the load is another than the one that the table was solved for",
    ),
}
"""By policy: what it is made for, and when it loses."""

CLAIM_WORDS: Mapping[str, str] = {
    "work_conservation": "that no step is left empty while something could run",
    "no_starvation": "that no request waits for ever",
    "fairness_bound": "that two tenants with work differ in service per weight by no more than a bound",
    "exactness": "that every answer has the tokens that it has alone",
    "block_conservation": "that no KV block is lost or used twice",
    "progress": "that every step advances something",
}
