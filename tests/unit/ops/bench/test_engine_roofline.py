"""Ideal time of the roofline."""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench.engine.roofline import Limits, ideal
from ops.simulate.machines.machines import ModelShape

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 32,
}  # fmt: skip
SHAPE = ModelShape.of(CONFIG)


def test_the_shape_of_a_llama() -> None:
    # A layer: q and o 8 x 8 each, k and v 8 x 4 each; gate, up and down 8 x 16 each.
    assert SHAPE.body_parameters == 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert SHAPE.head_parameters == 8 * 32
    assert SHAPE.attention_width == 2 * 4 * 2
    assert SHAPE.kv_width == 2 * 2 * 2 * 2


def test_the_shape_is_that_of_the_real_model() -> None:
    tiny = ModelShape.of(
        CONFIG
        | {
            "num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 8,
            "num_key_value_heads": 4, "intermediate_size": 768, "vocab_size": 4096,
        }
    )  # fmt: skip
    assert tiny.step_parameters == 5_767_168, "6.82 M parameters less the embedding and the norms"


def test_head_size_may_be_stated() -> None:
    assert ModelShape.of(CONFIG | {"head_dim": 16}).attention_width == 2 * 4 * 16


def test_prefill_counts_every_earlier_token_once() -> None:
    one, three = SHAPE.prefill_flops(1), SHAPE.prefill_flops(3)
    assert one == 2 * SHAPE.body_parameters + 4 * SHAPE.attention_width + 2 * SHAPE.head_parameters
    assert three - one == 2 * 2 * SHAPE.body_parameters + 4 * SHAPE.attention_width * (6 - 1)


def test_decode_steps_shrink_with_those_who_still_run() -> None:
    # Memory so slow that every step waits for it.
    limits = Limits(read_bytes_per_s=1000.0, flops_per_s=1e18)
    found = ideal(SHAPE, limits, [(3, 4), (5, 2), (7, 1)], element_bytes=4)
    weights = 3 * SHAPE.step_parameters
    # Step 1: contexts of 3 + 1 and 5 + 1; steps 2 and 3: the first request alone.
    context = (4 + 6) + 5 + 6
    assert found.decode_steps == found.memory_bound_steps == 3
    assert found.decode_s == pytest.approx((weights + SHAPE.kv_width * context) * 4 / 1000.0)
    assert found.output_tokens_per_s == pytest.approx(7 / (found.prefill_s + found.decode_s))


def test_where_memory_is_fast_computing_counts() -> None:
    limits = Limits(read_bytes_per_s=1e18, flops_per_s=1e6)
    found = ideal(SHAPE, limits, [(3, 2), (5, 2)], element_bytes=2)
    assert found.memory_bound_steps == 0
    assert found.decode_s == pytest.approx((SHAPE.decode_flops(4) + SHAPE.decode_flops(6)) / 1e6)
    assert found.prefill_s == pytest.approx((SHAPE.prefill_flops(3) + SHAPE.prefill_flops(5)) / 1e6)


def test_answers_of_one_token_need_no_decode() -> None:
    found = ideal(SHAPE, Limits(1.0, 1.0), [(3, 1)], element_bytes=4)
    assert (found.decode_s, found.decode_steps) == (0.0, 0)
