"""The attention function as transformers calls it: arguments that it accepts and refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from engine.model.attention import (
    ATTENTION_NAME,
    AttentionUnsupported,
    LayerShape,
    ProbeContext,
    attending,
    paged_attention_forward,
)
from kernels.reference import causal_mask, dense_attention

TOKENS, HEADS, KV_HEADS, DIM = 6, 4, 2, 8


def call(context: ProbeContext | None = None, *, module: Any = None, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, TOKENS, DIM, generator=generator)
    key, value = torch.randn(2, 1, KV_HEADS, TOKENS, DIM, generator=generator)
    with attending(context or ProbeContext()):
        output, weights = paged_attention_forward(
            module or SimpleNamespace(layer_idx=3), query, key, value, **options
        )
    assert weights is None
    return output


def expected(window: int | None, scale: float = DIM**-0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, TOKENS, DIM, generator=generator)
    key, value = torch.randn(2, 1, KV_HEADS, TOKENS, DIM, generator=generator)
    visible = causal_mask(TOKENS, TOKENS, window, query.device)
    return dense_attention(query, key, value, visible, scale=scale).transpose(1, 2)


def test_it_is_registered_and_no_mask_is_made_for_it() -> None:
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention_forward
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def test_the_output_is_laid_out_as_transformers_wants_it() -> None:
    output = call()
    assert output.shape == (1, TOKENS, HEADS, DIM)
    torch.testing.assert_close(output, expected(None))
    torch.testing.assert_close(call(scaling=0.5), expected(None, 0.5))


def test_a_window_of_none_is_full_attention_and_an_absent_one_is_the_modules() -> None:
    module = SimpleNamespace(layer_idx=0, sliding_window=2)
    torch.testing.assert_close(call(module=module), expected(2))
    torch.testing.assert_close(call(module=module, sliding_window=None), expected(None))
    torch.testing.assert_close(call(module=module, sliding_window=3), expected(3))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": torch.zeros(1, 1, TOKENS, TOKENS)}, "mask of its own"),
        ({"position_bias": torch.zeros(1, HEADS, TOKENS, TOKENS)}, "position bias"),
        ({"is_causal": False}, "not causal"),
        ({"module": SimpleNamespace(layer_idx=0, is_causal=False)}, "not causal"),
        ({"module": SimpleNamespace(layer_idx=None)}, "does not know which layer it is"),
    ],
)
def test_what_a_paged_causal_cache_cannot_give_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(AttentionUnsupported, match=reason):
        call(**options)


def test_the_probe_notes_what_each_layer_keeps() -> None:
    context = ProbeContext()
    call(context)
    call(context)
    assert context.shapes == {3: LayerShape(kv_heads=KV_HEADS, key_dim=DIM, value_dim=DIM)}


def test_outside_of_a_step_it_says_so() -> None:
    empty = torch.zeros(1, HEADS, TOKENS, DIM)
    with pytest.raises(RuntimeError, match="outside of a step"):
        paged_attention_forward(SimpleNamespace(layer_idx=0), empty, empty, empty)


def test_the_context_of_a_step_ends_with_it_even_when_it_fails() -> None:
    with pytest.raises(ZeroDivisionError), attending(ProbeContext()):
        raise ZeroDivisionError
    test_outside_of_a_step_it_says_so()
