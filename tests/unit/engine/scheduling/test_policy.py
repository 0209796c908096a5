"""Named policies, their claims and options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.scheduling.admit.buckets import LengthBuckets
from engine.scheduling.admit.peak import PeakAdmit
from engine.scheduling.admit.static import StaticBatch
from engine.scheduling.admit.window import DynamicWindow
from engine.scheduling.claims import ALL, FAIRNESS_BOUND, NO_STARVATION, WORK_CONSERVATION
from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.compose.slack import DeadlineSlack
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.options import BadOption, PolicyOptions
from engine.scheduling.policy import (
    POLICIES,
    UnknownPolicy,
    composition_notice,
    make_policy,
    options_of,
    refuse_idle_options,
)

PRESETS = [
    *("static", "dynamic", "buckets", "fcfs", "hrrn", "sjf", "srpt", "las", "mlfq"),
    *("priority", "edf", "drr", "dlpm", "vtc", "hybrid"),
]


def test_every_preset_exists_and_goes_by_its_name() -> None:
    assert sorted(POLICIES) == sorted(PRESETS)
    for name in POLICIES:
        policy = make_policy(name)
        assert policy.name == name
        assert policy.admit is not make_policy(name).admit or policy.admit == make_policy(name).admit
    with pytest.raises(UnknownPolicy, match="no policy 'best'; there are buckets, dlpm, drr, dynamic, edf"):
        make_policy("best")


def test_what_no_server_does_is_refused_by_name() -> None:
    """Padded batches are the simulator's: `tests/property/test_simulate_runs.py`."""
    with pytest.raises(
        UnknownPolicy, match=r"policy 'static-padded' is for `fairgate simulate` alone.*'static'"
    ):
        make_policy("static-padded")
    with pytest.raises(BadOption, match=r"admit 'static-padded' is for `fairgate simulate` alone"):
        options_of({"admit": "static-padded"})


def test_policies_do_not_share_state() -> None:
    for name in ("static", "dynamic", "buckets", "hybrid"):
        assert make_policy(name).admit is not make_policy(name).admit


def test_a_policy_promises_what_all_four_choices_promise() -> None:
    assert make_policy("hybrid").claims == ALL
    assert make_policy("vtc").claims == ALL
    assert make_policy("vtc", PolicyOptions(compose="slack")).claims == ALL - {FAIRNESS_BOUND}
    assert NO_STARVATION not in make_policy("las").claims
    assert WORK_CONSERVATION not in make_policy("static").claims
    assert FAIRNESS_BOUND not in make_policy("fcfs").claims


def test_a_policy_describes_itself() -> None:
    options = PolicyOptions(compose="token-fair", slots=32)
    described = make_policy("fcfs", options).describe()
    assert described["policy"] == "fcfs"
    assert described["order"] == "fcfs"
    assert described["admit"] == "predicted-reserve"
    assert described["compose"] == "token-fair"
    assert described["evict"] == "latest-victim"
    assert described["options"] == {"compose": "token-fair", "slots": 32}
    assert described["claims"] == sorted(make_policy("fcfs", options).claims)
    own = {"max_num_partial_prefills": 4, "target_step_s": 0.2, "small_lane_permille": 75}
    assert make_policy("hybrid").describe()["options"] == own
    changed = make_policy("hybrid", PolicyOptions(max_num_partial_prefills=1)).describe()["options"]
    assert changed == {**own, "max_num_partial_prefills": 1}


def test_options_reach_the_choices() -> None:
    options = PolicyOptions(
        max_num_partial_prefills=4, max_long_partial_prefills=2, long_prefill_token_threshold=77,
        long_chunk_permille=900, target_step_s=0.0, least_chunk_tokens=9, peak_quantile_permille=800,
        peak_jump_permille=50, peak_headroom_permille=20,
    )  # fmt: skip
    policy = make_policy("hybrid", replace(options, admit="peak", compose="decode-first"))
    assert policy.compose == DecodeFirst(PromptLimits(4, 2, 77, 0.0, 9, 900))
    assert policy.admit == PeakAdmit(quantile_permille=800, jump_permille=50, headroom_permille=20)
    window = make_policy("dynamic", PolicyOptions(batch_size=6, window_s=0.3, reserve_permille=100)).admit
    assert isinstance(window, DynamicWindow)
    assert (window.size, window.window_s, window.memory.permille) == (6, 0.3, 100)
    static = make_policy("static", PolicyOptions(batch_size=6)).admit
    assert isinstance(static, StaticBatch)
    assert static.size == 6
    buckets = make_policy(
        "buckets", PolicyOptions(bucket_ratio=4, suspend_after_s=2, longest_pause_s=3)
    ).admit
    assert isinstance(buckets, LengthBuckets)
    assert (buckets.ratio, buckets.suspend_after_s, buckets.longest_pause_s) == (4, 2, 3)
    fair = make_policy("vtc", PolicyOptions(compose="token-fair", slots=5, cap_tokens=7)).compose
    assert isinstance(fair, TokenFair)
    assert (fair.slots, fair.cap_tokens) == (5, 7)
    slack = make_policy("vtc", PolicyOptions(compose="slack", ttft_target_s=2, tpot_target_s=0.3)).compose
    assert isinstance(slack, DeadlineSlack)
    assert (slack.ttft_target_s, slack.tpot_target_s) == (2, 0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills must be between 1 and 4096, not 0"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be between 0 and"),
        ({"target_step_s": float("nan")}, "target_step_s must be between 0 and 3600, not nan"),
        ({"peak_quantile_permille": 1001}, "peak_quantile_permille must be between 500 and 1000, not 1001"),
        ({"window_s": -0.1}, "window_s must be between 0 and 3600, not -0.1"),
        ({"bucket_ratio": 1.0}, "bucket_ratio must be between 1.1 and 16, not 1.0"),
        (
            {"max_long_partial_prefills": 3, "max_num_partial_prefills": 2},
            r"max_long_partial_prefills \(3\) must not exceed max_num_partial_prefills \(2\)",
        ),
    ],
)
def test_a_number_out_of_range_is_named_with_its_bounds(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyOptions(**options)  # type: ignore[arg-type]


def test_choices_that_do_not_exist_are_named_with_those_that_do() -> None:
    with pytest.raises(UnknownPolicy, match="no compose 'best'; there are decode-first, lanes, slack"):
        make_policy("vtc", PolicyOptions(compose="best"))
    with pytest.raises(UnknownPolicy, match="no admit 'best'; there are buckets, dynamic"):
        make_policy("vtc", PolicyOptions(admit="best"))
    with pytest.raises(UnknownPolicy, match="no evict 'best'; there are attained-victim"):
        make_policy("vtc", PolicyOptions(evict="best"))


def test_the_table_must_be_handed_in() -> None:
    with pytest.raises(ValueError, match="a batch-or-wait table, and none is set"):
        make_policy("fcfs", PolicyOptions(admit="table"))


@pytest.mark.parametrize(
    ("policy", "options", "idle"),
    [
        ("fcfs", {"slots": 3}, "slots"),
        ("hybrid", {"compose": "slack", "cap_tokens": 64}, "cap_tokens"),
        ("vtc", {"long_prefill_token_threshold": 64}, "long_prefill_token_threshold"),
        ("fcfs", {"tpot_target_s": 0.1}, "tpot_target_s"),
        ("fcfs", {"long_prefill_token_threshold": 64, "target_step_s": 0.1}, ""),
        ("hybrid", {"slots": 3, "least_chunk_tokens": 8}, ""),
    ],
)
def test_an_option_that_does_nothing_under_the_composition_is_refused(
    policy: str, options: dict[str, Any], idle: str
) -> None:
    if not idle:
        refuse_idle_options(policy, PolicyOptions(**options))
        return
    with pytest.raises(BadOption, match=f"option {idle} does nothing here: the composition is "):
        refuse_idle_options(policy, PolicyOptions(**options))


def test_a_composition_that_turns_token_fairness_off_says_so() -> None:
    lanes = PolicyOptions(compose="lanes")
    assert composition_notice("hybrid", lanes).startswith("compose=lanes turns the token-fair composition")
    assert composition_notice("fcfs", lanes) == composition_notice("hybrid", PolicyOptions()) == ""
