"""Generated tenants send what their kind says, the same from the same seed."""

from __future__ import annotations

from collections import Counter

import pytest

from ops.simulate.presets import PRESETS
from ops.simulate.traffic.generate import Generated, Spec


def test_the_same_seed_draws_the_same_requests_in_order_of_arrival() -> None:
    source = Generated(Spec.of("tenants=5,rate=20,seconds=60,onoff=1,long=1,hot=1,cold=1,flooder=2"), 7)
    found = list(source)
    assert found == list(source)
    assert found != list(Generated(source.spec, 8))
    assert [each.arrival_s for each in found] == sorted(each.arrival_s for each in found)


def test_shares_are_zipfs_and_the_flooder_sends_as_often_as_it_is_told() -> None:
    found = list(Generated(Spec(tenants=4, skew=1.0, rate=50, seconds=200, flooder=3)))
    counts = Counter(each.tenant for each in found)
    for rank in range(1, 5):
        assert counts[f"zipf-{rank}"] / counts["zipf-1"] == pytest.approx(1 / rank, rel=0.1)
    ordinary = sum(counts[f"zipf-{rank}"] for rank in range(1, 5))
    assert ordinary == pytest.approx(10_000, rel=0.05)
    assert counts["flooder"] / ordinary == pytest.approx(3, rel=0.05)


def test_every_kind_of_tenant_is_as_it_is_named() -> None:
    source = Generated(Spec(tenants=2, rate=20, seconds=120, onoff=1, long=1, hot=2, cold=1))
    kinds = ("onoff", "long", "hot", "cold", "zipf")
    found = {kind: [each for each in source if each.tenant.startswith(kind)] for kind in kinds}
    assert all(int(each.arrival_s / 30) % 2 == 0 for each in found["onoff"])
    mean = {kind: sum(each.input_tokens for each in its) / len(its) for kind, its in found.items()}
    assert mean["long"] > 5 * mean["zipf"]
    assert max(each.input_tokens for each in found["long"]) <= 32_768
    beginnings = {each.tenant: each.prefix_blocks for each in found["hot"]}
    assert len(set(beginnings.values())) == 2, "each hot tenant has its own beginning"
    assert all(each.prefix_blocks == beginnings[each.tenant] != () for each in found["hot"])
    assert all(each.prefix_blocks == () for each in found["cold"])
    assert mean["cold"] == pytest.approx(mean["hot"], rel=0.15)
    assert source.has_prefixes
    assert not Generated(Spec()).has_prefixes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tenants", "not NAME=NUMBER; names are tenants, skew"),
        ("colour=3", "not NAME=NUMBER"),
        ("tenants=many", "tenants must be a whole number"),
        ("tenants=0", "tenants must be between 1 and"),
        ("rate=nan", "rate must be between"),
        ("rate=-1", "rate must be between"),
        ("lengths=none", "lengths must be one of azure"),
        ("rate=100000,seconds=1000000", "lower rate, seconds or flooder"),
    ],
)
def test_a_bad_spec_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Spec.of(text)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_requests(name: str) -> None:
    found = list(PRESETS[name].source(0))
    assert len(found) >= 500
    assert [each.arrival_s for each in found] == sorted(each.arrival_s for each in found)


def test_the_70b_scenario_is_the_published_one() -> None:
    preset = PRESETS["seventy-b"]
    found = list(preset.source(0))
    assert len(found) == 1000
    assert {each.arrival_s for each in found} == {0.0}
    assert min(each.output_tokens for each in found) >= 50
    assert max(each.output_tokens for each in found) <= 1000
    assert (preset.gpu, preset.tensor_parallel, preset.options.batch_size) == ("h200", 4, 32)
    assert [claim.split()[0] for claim in preset.claims.values()] == ["800", "2,400", "7,200"]
