"""A braked tier holds at most its share of an ideal engine, for any traffic, and others go on as before."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.brakes import NO_BRAKES, Brakes
from tests.support.flow_pool import REPLICA, FlowPool, Party

pytestmark = pytest.mark.long

STANDARD, BATCH = 1, 2
MET: Counter[str] = Counter()


@given(
    places=st.integers(1, 12),
    kv_tokens=st.sampled_from([150, 400, 100_000]),
    share=st.floats(0.01, 0.99),
    tier=st.sampled_from([STANDARD, BATCH]),
    lengths=st.lists(st.integers(5, 60), min_size=3, max_size=8),
    lookahead=st.integers(0, 2),
    others=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def _holds(
    places: int, kv_tokens: int, share: float, tier: int, lengths: list[int], lookahead: int, others: int
) -> None:
    def size(number: int) -> tuple[int, int]:
        return 10, lengths[number % len(lengths)]

    other = STANDARD + BATCH - tier
    pool = FlowPool(
        places=places,
        kv_tokens=kv_tokens,
        lookahead=lookahead,
        options={"ageing_s": (math.inf, 6.0, 4.0)},
        parties=[
            Party("braked", places + 3, tier, size=size),
            Party("also braked", 2, tier, size=size),
            Party("free", others, other, size=size),
        ],
    )
    pool.run(8.0)
    pool.flow.set_brakes(Brakes({tier: share}), pool.now_s)
    pool.flow.check()
    load = pool.flow.placement.load(REPLICA)
    most, most_kv = max(1, int(places * share)), max(1, int(kv_tokens * share))
    before = load.sequences[tier]
    served, free = pool.served("braked") + pool.served("also braked"), pool.served("free")
    for _ in range(100):
        pool.run(pool.now_s + 0.25)
        held = load.sequences[tier]
        assert held <= max(most, before), "more than its share was sent"
        assert load.kv_tokens[tier] <= most_kv or held <= before or held == 1
        assert not any(
            pool.flow.queue.place(ticket.entry.entry_id)[0] != tier
            for ticket in pool.flow.queue.tickets()
            if ticket.entry.tier == tier
        ), "a braked tier ages"
        MET["ran above its share"] += held > most
        MET["held its share"] += held == most < places
        MET["bounded by memory"] += held < most and load.kv_tokens[tier] > most_kv - 70
        before = held
    if not others:
        assert pool.served("braked") + pool.served("also braked") > served, "it goes on"
    if others and tier == STANDARD:
        assert pool.served("free") > free, "lower tiers go past it"
        MET["lower tiers went on"] += 1
    pool.flow.set_brakes(NO_BRAKES, pool.now_s)
    pool.run(pool.now_s + 20.0)
    MET["more than its share afterwards"] += load.sequences[tier] > most


def test_a_braked_tier_holds_at_most_its_share() -> None:
    MET.clear()
    _holds()
    for case in (
        "ran above its share",
        "held its share",
        "bounded by memory",
        "lower tiers went on",
        "more than its share afterwards",
    ):
        assert MET[case] > 0, f"no run came to: {case}"
