"""What served is described anew where it has changed, and only there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine.messages import Snapshot
from engine.step_time.model import PRIOR
from gateway.domain.server_description import server_of, terms_of
from gateway.explain import describer as module
from gateway.explain.describer import PACE_EVERY_S, Describer
from gateway.requests.run import Run
from tenants.admin.platform.policy import StoredPolicy
from tenants.pricing.pricing import Price, uniform_book
from tenants.types import Limit, Meter, Principal, SubjectKind, Tier
from tests.support.builders import site
from tests.unit.gateway.estimates.test_estimator import StillEngine

PRINCIPAL = Principal("t", "t", "p", "k", "x", 2.0, frozenset(), Tier.STANDARD, frozenset(Tier), None)
LIMIT = Limit("lim_1", "t", SubjectKind.TENANT, "t", Meter.TOTAL_TOKENS, 600, rate_per_s=10.0)


class House:
    """A describer, and what it looks at."""

    def __init__(self) -> None:
        self.engine = StillEngine()
        self.policy = StoredPolicy("vtc", {"slots": 4})
        self.describer = Describer(
            site(None, gateway_id="gw_1"),
            "m",
            cast(Any, [self.engine]),
            lambda: self.policy,
            is_foreign=False,
        )

    def report(self, samples: int, slower: float = 1.0) -> None:
        pace = msgspec.structs.replace(PRIOR, samples=samples, per_token_s=PRIOR.per_token_s * slower)
        self.engine.snapshot = Snapshot("a", 1, 0.0, [], [], 1, 0, 0, 1, PRIOR, mean_step_time=pace)


def test_the_same_server_has_one_name_whatever_happened_in_between() -> None:
    house = House()
    first = house.describer.server(0.0)
    found = server_of(first.content)
    assert (found.gateway_id, found.model, found.policy, found.options) == ("gw_1", "m", "vtc", {"slots": 4})
    assert [(each.kv_tokens, each.max_sequences) for each in found.engines] == [(65_536, 8)]
    assert house.describer.server(1.0) is first

    house.policy = StoredPolicy("fcfs")
    second = house.describer.server(2.0)
    assert server_of(second.content).policy == "fcfs"
    house.policy = StoredPolicy("vtc", {"slots": 4})
    assert house.describer.server(3.0) == first
    assert house.engine.ready is not None
    house.engine.ready = msgspec.structs.replace(house.engine.ready, max_sequences=9)
    assert server_of(house.describer.server(4.0).content).engines[0].max_sequences == 9
    assert House().describer.server(0.0) == first, "another process, the same name"


def test_a_pace_is_taken_where_it_has_changed_and_often_while_the_engine_is_young() -> None:
    house = House()
    assert server_of(house.describer.server(0.0).content).step_time is None
    house.report(100)
    first = house.describer.server(1.0)
    assert server_of(first.content).step_time is not None
    house.report(150, slower=3.0)
    assert house.describer.server(2.0) is first, "soon enough"
    house.report(200, slower=3.0)
    doubled = house.describer.server(3.0)
    assert doubled != first
    house.report(210, slower=3.03)
    assert house.describer.server(3.0 + PACE_EVERY_S) is doubled, "a hundredth is no change"
    house.report(220, slower=4.0)
    assert house.describer.server(3.0 + 2 * PACE_EVERY_S) != doubled


def _run(**principal: Any) -> Run:
    limits = principal.pop("limits", None)
    return cast(
        Run,
        SimpleNamespace(
            call=SimpleNamespace(
                principal=replace(PRINCIPAL, **principal), model="tiny", tier=Tier.INTERACTIVE
            ),
            leases=None if limits is None else SimpleNamespace(limits=limits),
            prices=uniform_book({"tiny": Price(100, 50, 300)}),
        ),
    )


def test_terms_are_the_limits_that_it_was_held_on_with_the_price_where_they_need_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    describer = House().describer
    limited = terms_of(describer.terms(_run(limits=(LIMIT,))).content)
    assert (limited.weight, limited.limits) == (2.0, (LIMIT,))
    assert limited.price is not None
    assert limited.price.multiplier == 2_000
    free = describer.terms(_run(reserved_tokens_per_s=7.0, reserved_tier=Tier.BATCH))
    assert terms_of(free.content).price is None
    stored = terms_of(free.content)
    assert (stored.reserved_cost_per_s, stored.reserved_tier) == (7.0, Tier.BATCH)
    monkeypatch.setattr(module, "MAX_TERMS", 2)
    for weight in range(1, 10):
        describer.terms(_run(weight=float(weight)))
    assert len(describer._terms) <= 2
