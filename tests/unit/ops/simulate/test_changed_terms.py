"""Weights and limits in place of those that served."""

from __future__ import annotations

import pytest

from ops.simulate.changed_terms import limits_in_file, weights_asked, with_terms
from ops.simulate.recorded import Recorded, read
from ops.simulate.traffic.requests import BadTrace
from tenants.config_file.yaml_reader import BadFile
from tests.unit.ops.simulate.test_recorded import timeline


def traffic() -> Recorded:
    """One answer of acme and one of slow: 64 tokens in, 21 out, of weight 2 and without limits."""
    return read([timeline("acme"), timeline("slow")], "traffic")


def limits(text: str) -> bytes:
    return f"version: 1\n{text}".encode()


def test_limits_bind_what_they_would_bind_and_nobody_else() -> None:
    file = limits(
        "platform_limits:\n- {meter: concurrency, amount: 4}\n"
        "tenants:\n- name: acme\n  limits:\n"
        "  - {meter: requests, rate_per_s: 2, amount: 5}\n"
        "  - {meter: requests, window: day, amount: 5, tier: batch}\n"
        "  - {meter: requests, window: day, amount: 5, model: other}\n"
        "  - {meter: requests, window: day, amount: 5, above_tokens: 1000000}\n"
        "- name: never-here\n  limits:\n  - {meter: requests, window: day, amount: 1}\n"
    )
    changed, words = with_terms(traffic(), "small", {}, limits_in_file(file))
    of_acme, of_slow = [
        {(each.meter.value, each.subject_id, each.amount) for each in answer.terms.limits}
        for answer in sorted(changed.served, key=lambda each: each.tenant)
    ]
    assert of_acme == {("concurrency", "platform", 4), ("requests", "acme", 5)}
    assert of_slow == {("concurrency", "platform", 4)}
    assert words[:2] == [
        "platform: limit concurrency 4 (served: none)",
        "acme: limit requests rate 5 at 2 a second (served: none)",
    ]
    assert not any("never-here" in each for each in words)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (
            "tenants:\n- name: acme\n  limits:\n  - meter: smiles\n    window: day\n    amount: 1\n",
            5,
            "meter",
        ),
        ("tenants:\n- name: acme\n  limits:\n  - {meter: requests, window: day}\n", 5, "amount: is missing"),
        (
            "tenants:\n- name: acme\n  limits:\n  - {meter: requests, window: day, amount: 1,\n    key: k}\n",
            6,
            "which of them sent a request is not recorded",
        ),
        ("tenant: []\n", 2, "there is no such key"),
        ("tenants: [\n", 3, "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text: str, line: int, why: str) -> None:
    with pytest.raises(BadFile) as refused:
        limits_in_file(limits(text))
    assert refused.value.line == line, str(refused.value)
    assert why in str(refused.value)


def test_what_would_change_nothing_or_cannot_be_counted_is_refused() -> None:
    strange = limits_in_file(limits("tenants:\n- name: x\n  limits:\n  - {meter: concurrency, amount: 1}\n"))
    with pytest.raises(BadTrace, match="no limit of the file concerns a tenant"):
        with_terms(traffic(), "small", {}, strange)
    money = limits_in_file(limits("platform_limits:\n- {meter: cost_nanousd, window: day, amount: 1}\n"))
    with pytest.raises(BadTrace, match="is not recorded"):
        with_terms(traffic(), "small", {}, money)


def test_weights() -> None:
    changed, words = with_terms(traffic(), "small", weights_asked(["acme = 3", "slow=2"]), [])
    assert {each.tenant: each.terms.weight for each in changed.served} == {"acme": 3.0, "slow": 2.0}
    assert words == ["weight of acme 3 (served: 2)"]
    for text in ("acme", "=3", "acme=much", "acme=nan", "acme=-1"):
        with pytest.raises(ValueError, match="--weight"):
            weights_asked([text])
