"""The queue's guarantees hold while the knobs of the control loop move and learned tables switch.

Random histories on the real controller in front of an ideal engine: every second the real `Control` is told
that knobs rest elsewhere (as a table does that switches) and sees other traffic, and every knob that it has
turns. Each promise is shown beside what is at stake, so that a history in which no knob moved fails.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.flow.control_rules import Control, ControlMode, Observation
from gateway.flow.knobs import DEFAULT_BOUNDS, Knob
from gateway.flow.lanes import LaneRule
from gateway.pools.control_loop import bounds_of, queue_setters
from tests.support.flow_pool import FlowPool, Party

INTERACTIVE, STANDARD, BATCH = 0, 1, 2
AGEING_S = (math.inf, 20.0, 30.0)
PLACES, LOOKAHEAD = 4, 2
LANES = LaneRule(long_tokens=100, share_sequences=0.5, share_kv=0.5, batch_share=1.0)


class TurnedPool:
    """A pool whose knobs move all the time."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.draw = random.Random(seed)
        self.pool = FlowPool(places=PLACES, lookahead=LOOKAHEAD, options={"lanes": LANES, **options})
        self.setters = queue_setters(self.pool.flow)
        rests = {Knob.LOOKAHEAD: float(LOOKAHEAD), Knob.LONG_SHARE: LANES.share_sequences}
        bounds = bounds_of(ControlMode.ACTING, self.setters, rests)
        # Sooner than a real one turns back, so that much happens.
        self.control = Control(ControlMode.ACTING, bounds, reversal_s=2.0)
        self.turned: Counter[Knob] = Counter()
        self._stands = self.control.in_force

    def run(self, until_s: float) -> None:
        """Lets time pass; knobs turn every second."""
        while self.pool.now_s < until_s:
            self.pool.run(min(until_s, self.pool.now_s + 1.0))
            self.turn()

    def turn(self) -> None:
        draw, now_s = self.draw, self.pool.now_s
        if draw.random() < 0.4:
            knob = draw.choice(sorted(self.setters))
            bounds = DEFAULT_BOUNDS[knob]
            self.control.rest_at({knob: draw.uniform(bounds.lowest, bounds.highest)}, "a table", now_s)
        seen = Observation(
            1.0, 2 * draw.random(), draw.random(), draw.random(), 0.02, draw.random(), 9, 0, draw.random(),
            draw.random(),
        )  # fmt: skip
        self.control.look(seen, now_s)
        for knob, value in self.control.in_force.items():
            bounds = DEFAULT_BOUNDS[knob]
            assert bounds.lowest <= value <= bounds.highest
            if value != self._stands[knob]:
                self.turned[knob] += 1
                self.setters[knob](value)
        self._stands = self.control.in_force

    def require_turned(self) -> None:
        """Every knob moved, or nothing was at stake."""
        assert set(self.turned) == set(self.setters), "some knob never moved"


def sizes(seed: int, longest: int) -> Any:
    return lambda number: (
        random.Random(f"{seed} {number}").randint(1, longest),
        random.Random(f"{seed} {number} out").randint(1, longest),
    )


@given(
    seed=st.integers(0, 10_000),
    weights=st.tuples(st.sampled_from([1.0, 2.0, 0.5]), st.sampled_from([1.0, 3.0])),
    tier=st.integers(0, 2),
)
@settings(max_examples=6, deadline=None)
def test_two_backlogged_tenants_stay_within_the_bound_while_knobs_move(
    seed: int, weights: tuple[float, float], tier: int
) -> None:
    """|W_f / w_f - W_g / w_g| <= 2U / min(w), U = max(longest input, 2 x tokens in what was dispatched)."""
    longest = 40
    # Nothing ages: what moves up a tier goes before the others of its own.
    turned = TurnedPool(seed)
    pool = turned.pool
    pool.parties = [
        Party("f", 3, tier=tier, weight=weights[0], size=sizes(seed, longest)),
        Party("g", 40, tier=tier, weight=weights[1], size=sizes(seed + 1, longest // 4)),
    ]
    most = PLACES + int(DEFAULT_BOUNDS[Knob.LOOKAHEAD].highest)
    bound = 2 * max(longest, 2 * most * 2 * longest) / min(weights)
    worst = 0.0
    for step in range(1, 800):
        turned.run(step * 1.0)
        worst = max(worst, abs(pool.served("f") / weights[0] - pool.served("g") / weights[1]))
    assert worst <= bound
    assert pool.served("f") > bound, "too short a run to say anything"
    turned.require_turned()


@given(seed=st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_no_tenant_starves_while_knobs_move(seed: int) -> None:
    """A batch request, and one that is long, under an endless flood of the highest tier: at the latest when
    they have aged by the operator's times, which no knob makes longer."""
    turned = TurnedPool(seed, ageing_s=AGEING_S)
    pool = turned.pool
    pool.parties = [
        Party("day", 10, tier=INTERACTIVE),
        Party("long day", 5, tier=INTERACTIVE, size=lambda n: (80, 40)),
    ]
    turned.run(20.0)
    for _ in range(3):
        began_s = pool.now_s
        waits = [pool.arrive("night", tier=BATCH), pool.arrive("thinker", 90, 60, tier=STANDARD)]
        while not all(each in pool.started_s for each in waits):
            assert pool.now_s - began_s <= 2 * AGEING_S[BATCH] + 10, "it starves"
            turned.run(pool.now_s + 1.0)
        turned.run(pool.now_s + 5.0)
    assert turned.turned[Knob.AGEING]
    assert turned.turned[Knob.BATCH_SHARE]


@given(seed=st.integers(0, 10_000), tier=st.integers(0, 2))
@settings(max_examples=6, deadline=None)
def test_a_reservation_is_honoured_while_knobs_move(seed: int, tier: int) -> None:
    turned = TurnedPool(seed, ageing_s=AGEING_S)
    pool = turned.pool
    rate = 0.45 * pool.capacity
    pool.parties = [
        Party("paid", 6, tier=tier, reserved=rate, size=sizes(5, 40)),
        *(Party(f"flood {number}", 20, tier=INTERACTIVE) for number in range(3)),
    ]
    turned.run(200.0)
    assert pool.served("paid") / (rate * 200.0) >= 0.97
    assert turned.turned[Knob.BATCH_CAP], "its places were never fewer than what it reserved"


def test_with_the_fewest_places_a_reservation_has_its_own_and_the_rest_has_less() -> None:
    served: dict[str, dict[float, float]] = {"paid": {}, "flood": {}}
    for batch_cap in (0.25, 1.0):
        pool = FlowPool(places=PLACES, lookahead=LOOKAHEAD)
        queue_setters(pool.flow)[Knob.BATCH_CAP](batch_cap)
        rate = 0.45 * pool.capacity
        assert rate > 0.25 * pool.capacity, "nothing was at stake"
        pool.parties = [Party("paid", 6, tier=BATCH, reserved=rate), Party("flood", 20, tier=INTERACTIVE)]
        pool.run(200.0)
        for tenant, by_cap in served.items():
            by_cap[batch_cap] = pool.served(tenant) / (rate * 200.0)
    assert min(served["paid"].values()) >= 0.97
    assert served["flood"][0.25] < served["flood"][1.0]
