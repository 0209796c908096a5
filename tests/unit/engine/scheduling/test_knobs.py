"""Knobs of a running engine: which numbers they turn, in which choices, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from engine.messages import EngineKnobs
from engine.scheduling.admit.peak import PeakAdmit
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.admit.static import StaticBatch
from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.knobs import check_knobs, turned, turned_options
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import make_policy

TURNED = EngineKnobs(slot_share=0.5, partial_prefills=2, reserve_permille=250)


def test_the_numbers_of_choices_are_turned_and_the_choices_stay() -> None:
    policy = make_policy("learned")
    compose = policy.compose
    assert isinstance(compose, TokenFair)
    compose.credit_tokens = 7
    after = turned(policy, TURNED, 64)
    assert after.compose is compose
    assert [compose.most_decodes(auto) for auto in (0, 24, 40)] == [32, 24, 32], "the fewer of the two"
    assert (compose.slots, compose.max_num_partial_prefills, compose.credit_tokens) == (32, 2, 7)
    assert after.admit == PredictedReserve(permille=250, small_permille=75)
    assert after.options == policy.options, "what the policy itself says"
    back = turned(after, EngineKnobs(), 64)
    assert (compose.slots, compose.max_num_partial_prefills) == (0, 4)
    assert back.admit == make_policy("hybrid").admit


def test_choices_without_such_a_number_are_left_alone_and_nested_ones_are_found() -> None:
    fcfs = turned(make_policy("fcfs"), TURNED, 8)
    assert isinstance(fcfs.compose, DecodeFirst)
    assert fcfs.compose.limits.max_num_partial_prefills == 2
    static = turned(make_policy("static"), TURNED, 8)
    assert isinstance(static.admit, StaticBatch)
    assert static.admit.memory.permille == 250
    peak = make_policy("hybrid", PolicyOptions(admit="peak"))
    assert turned(peak, TURNED, 8).admit is peak.admit
    assert isinstance(peak.admit, PeakAdmit)
    prompt_only = turned(make_policy("hybrid", PolicyOptions(admit="prompt-only")), TURNED, 8)
    assert prompt_only.admit == PredictedReserve(permille=0, name="prompt-only"), "it sets nothing aside"


def test_a_share_of_the_sequences_never_gives_more_slots_than_the_option_nor_none() -> None:
    options = PolicyOptions(slots=10, max_long_partial_prefills=3, max_num_partial_prefills=6)
    assert turned_options(options, EngineKnobs(slot_share=0.25), 64).slots == 10
    assert turned_options(options, EngineKnobs(slot_share=0.25), 16).slots == 4
    assert turned_options(options, EngineKnobs(slot_share=0.01), 16).slots == 1
    assert turned_options(options, EngineKnobs(), 16) == options
    assert turned_options(PolicyOptions(), EngineKnobs(slot_share=0.25), 16).slots == 4
    fewer = turned_options(options, EngineKnobs(partial_prefills=2), 16)
    assert (fewer.max_num_partial_prefills, fewer.max_long_partial_prefills) == (2, 2)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("token_share", 0.0, "token_share is a share above 0 and at most 1, not 0.0"),
        ("slot_share", 1.01, "slot_share is a share above 0 and at most 1, not 1.01"),
        ("slot_share", float("nan"), "slot_share is a share above 0 and at most 1, not nan"),
        ("partial_prefills", 0, "partial_prefills must be between 1 and 4096, not 0"),
        ("reserve_permille", 1001, "reserve_permille must be between 0 and 1000, not 1001"),
    ],
)
def test_a_knob_beyond_its_bounds_is_refused_by_name(name: str, value: float, says: str) -> None:
    asked: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=says):
        check_knobs(EngineKnobs(**asked))
