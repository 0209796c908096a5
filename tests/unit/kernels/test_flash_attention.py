"""The adapter of flash-attn: called as version 2.8 wants it, over our cache, equal to the reference."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.machine import AttentionNeeds, KernelMachine, LayerNeeds
from kernels.trial import choose_for

CPU = torch.device("cpu")
H100 = KernelMachine("cuda", (9, 0), "H100")


class FlashAttn(ModuleType):
    """Takes what flash-attn 2.8 takes, strictly; answers by the reference's arithmetic."""

    calls: list[str]

    def flash_attn_with_kvcache(
        self, q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, **options: Any
    ) -> torch.Tensor:
        self.calls.append("decode")
        assert q.shape[:2] == (len(cache_seqlens), 1)
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        return self._answer(q[:, 0], k_cache, v_cache, starts, cache_seqlens, **options)[:, None]

    def flash_attn_varlen_func(
        self, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
        max_seqlen_k: int, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        self.calls.append("ragged")
        lengths = cu_seqlens_k.diff()
        assert (int(cu_seqlens_q.diff().max()), int(lengths.max())) == (max_seqlen_q, max_seqlen_k)
        return self._answer(q, k, v, cu_seqlens_q, lengths, **options)

    def _answer(
        self, q: Any, k: Any, v: Any, starts: Any, lengths: Any, *, block_table: Any, softmax_scale: float,
        causal: bool, window_size: tuple[int, int], softcap: float,
    ) -> torch.Tensor:  # fmt: skip
        assert causal
        assert {each.dtype for each in (starts, lengths, block_table)} == {torch.int32}
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert k.shape[1] % 256 == 0
        assert len(block_table) == len(lengths) == len(starts) - 1
        before, after = window_size
        assert (before >= 0, after) in ((False, -1), (True, 0))
        window = before + 1 if before >= 0 else None
        parts = []
        for row, length in enumerate(lengths.tolist()):
            part = q[starts[row] : starts[row + 1]].transpose(0, 1)[None]
            keys, values = (
                reference.gather_context(cache, block_table[row].long(), length).transpose(0, 1)[None]
                for cache in (k, v)
            )
            seen = reference.causal_mask(part.shape[2], length, window, CPU)
            attended = reference.dense_attention(
                part, keys, values, seen, scale=softmax_scale, softcap=softcap or None
            )
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)


@pytest.mark.parametrize("layer", [LayerNeeds(4, 2, 64, 64), LayerNeeds(6, 2, 32, 32, 300, 30.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_called_as_it_wants_to_be(
    layer: LayerNeeds, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = AttentionNeeds(dtype, 256, (layer,))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match=r"'flash-attn' cannot run: it does not run here: .*flash_attn"):
        choose_for(needs, CPU, name="flash-attn", machine=H100)
    package = FlashAttn("flash_attn")
    package.calls = []
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert choose_for(needs, CPU, name="flash-attn", machine=H100).kernel.name == "flash-attn"
    assert package.calls == ["ragged", "ragged", "decode"]
