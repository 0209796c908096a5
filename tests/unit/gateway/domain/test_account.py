"""The account of a request says how its tokens came, without naming other tenants."""

from __future__ import annotations

import json
from typing import Any

from engine.messages import DecodeShare
from gateway.domain.account import Account, decode_together, refills_of
from gateway.domain.estimate import Times
from tenants.quota.store import LimitState
from tenants.types import NOTHING, Meter, Tier
from tests.support.quota import limit, on_platform


def test_the_ways_of_several_sequences_are_added_up() -> None:
    one = DecodeShare(12, 8, 3, 40, 5, {"ten_rival": 40, "ten_big": 5})
    other = DecodeShare(1, 2, 3, 4, 5, {"ten_rival": 9})
    assert decode_together([one, other]) == DecodeShare(13, 10, 6, 44, 10, {"ten_rival": 49, "ten_big": 5})
    assert decode_together([]) == DecodeShare()


def test_an_answer_shows_floor_turns_and_causes_and_names_no_other_tenant() -> None:
    share = DecodeShare(12, 8, 3, 40, 5, {"ten_rival": 45})
    account = Account(
        "req_1", "acme", "standard", "completed", None, None, Times(0.0), NOTHING, NOTHING, 0, 0, decode=share
    )
    shown = account.as_json()
    assert shown["decode"] == {
        "floor_tokens": 12,
        "turn_tokens": 8,
        "sat_out": {"own": 3, "share": 40, "tier": 5},
    }
    assert "ten_rival" not in json.dumps(shown)


def test_an_answer_of_an_upstream_does_not_pretend_to_know_how_its_tokens_came() -> None:
    account = Account("req_1", "acme", "standard", "refused", None, None, Times(0.0), NOTHING, NOTHING, 0, 0)
    assert account.as_json()["decode"] is None


def test_it_says_what_rates_with_a_ceiling_refilled_at_and_nothing_of_the_platforms() -> None:
    batch: dict[str, Any] = {"rate_per_s": 5.0, "ceiling_per_s": 20.0, "tier": Tier.BATCH}
    states = [
        LimitState(limit(Meter.OUTPUT_TOKENS, 100, **batch), 0, 0, 100, 0.0, refill_per_s=12.5),
        LimitState(on_platform(Meter.OUTPUT_TOKENS, 100, **batch), 0, 0, 100, 0.0, refill_per_s=12.5),
        LimitState(limit(amount=100, rate_per_s=7), 0, 0, 100, 0.0, refill_per_s=7.0),
        LimitState(limit(), 0, 0, 100, 0.0),
    ]
    refills = refills_of(states)
    account = Account(
        "req_1", "a", "batch", "completed", None, None, Times(0.0), NOTHING, NOTHING, 0, 0, refills=refills
    )  # fmt: skip
    assert account.as_json()["refills"] == [
        {"meter": "output_tokens", "rate_per_s": 5.0, "ceiling_per_s": 20.0, "refill_per_s": 12.5}
    ]
    assert refills_of(states[1:]) == ()
