"""KV goes along where that is predicted to be faster, and only where it can be used."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from engine.messages import ModelInfo, Ready, StepTime
from gateway.upstream.kv_transfer import MAX_KV_BYTES, recompute_s, takes_kv

MODEL = ModelInfo("m", "llama", 1, 8192, 640, [2], "bfloat16", "cuda", "")
READY = Ready("e", MODEL, "vtc", 16, 512, 64, 100, pid=1, kv_token_bytes=1000)
STEP_TIME = StepTime(0.01, 0.001, 1e-6, 0.0, 100, 0.0)


def test_recomputing_takes_a_step_for_each_chunk() -> None:
    contexts = sum(range(1, 251))
    assert recompute_s(250, 100, STEP_TIME) == pytest.approx(3 * 0.01 + 250 * 0.001 + contexts * 1e-6)


@pytest.mark.parametrize("links", [(2e6, 0.8e6), (0.8e6, 2e6)])
def test_the_faster_way_is_taken_and_both_links_count(links: tuple[float, float]) -> None:
    # 0.24 s to compute again, 200 kB to carry.
    assert takes_kv(200, READY, READY, (2e6, 2e6), STEP_TIME)
    assert not takes_kv(200, READY, READY, links, STEP_TIME)


def test_kv_that_fits_no_message_or_not_the_other_engine_is_left() -> None:
    fast, most = (1e12, 1e12), MAX_KV_BYTES // 1000
    assert takes_kv(most, READY, READY, fast, STEP_TIME)
    assert not takes_kv(most + 1, READY, READY, fast, STEP_TIME)
    for changes in (
        {"kv_token_bytes": 2000},
        {"model": replace(MODEL, dtype="float16")},
        {"kv_token_bytes": 0},
    ):
        other = replace(READY, **changes)
        assert not takes_kv(9, READY, other, fast, STEP_TIME)
        assert not takes_kv(9, other, READY, fast, STEP_TIME)
