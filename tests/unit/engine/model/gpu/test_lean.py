"""The lean forward: the plain model's logits from weights that are shared with it, or a reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.model.attention import ATTENTION_NAME, LayerCache, ProbeContext, attending
from engine.model.forward import PlainForward
from engine.model.gpu.choose import LEAN_FORWARD, PLAIN_FORWARD
from engine.model.gpu.lean import LeanForward
from kernels.batch import PackedBatch, pack
from kernels.dispatch import AttentionKernel
from kernels.machine import AttentionNeeds
from kernels.trial import choose_for
from tests.models.random_models import save_random_model
from tests.support.stand_in_device import CARD, DEVICE, StandIn, needs_stand_in
from tests.unit.engine.model.cpu.test_fast_paths import load, logits, prompt, report, twin_steps

CPU = torch.device("cpu")
EVERY_BIAS = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, with biases and wide heads": (
        "llama", {**EVERY_BIAS, "num_attention_heads": 8, "head_dim": 16, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }}
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}  # fmt: skip
"""With windows, with biases of queries alone, with norms of heads."""
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma is not one of llama": ("gemma", {}, {}),
    "its activation is gelu": ("llama", {"hidden_act": "gelu"}, {}),
    "it needs the triton attention kernel, not torch-sdpa": ("llama", {}, {"attention": "torch-sdpa"}),
    "switched off": ("llama", {}, {"fast_paths": False}),
}  # fmt: skip


@pytest.fixture
def on_the_stand_in() -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    with StandIn():
        yield {"device": str(DEVICE), "attention": "triton", "dtype": "float32", "machine": CARD}


@needs_stand_in
@pytest.mark.parametrize("case", MODELS)
def test_it_gives_the_plain_logits(case: str, tmp_path: Path, on_the_stand_in: dict[str, Any]) -> None:
    name, changes = MODELS[case]
    save_random_model(name, tmp_path / name, **changes)
    ours = load(name, tmp_path, **on_the_stand_in)
    assert isinstance(ours._forward, LeanForward)
    assert report(ours, LEAN_FORWARD).chosen
    plain = load(name, tmp_path, dtype="float32", fast_paths=False)
    for slices, rows in twin_steps():
        got, expected = logits(ours, slices, rows).cpu(), logits(plain, slices, rows)
        assert got.shape == (len(rows), 500)
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@needs_stand_in
@pytest.mark.parametrize("reason", REFUSED)
def test_the_plain_pass_serves_where_it_does_not(
    reason: str, tmp_path: Path, on_the_stand_in: dict[str, Any]
) -> None:
    name, changes, options = REFUSED[reason]
    save_random_model(name, tmp_path / name, **changes)
    runner = load(name, tmp_path, **on_the_stand_in | options)
    assert isinstance(runner._forward, PlainForward)
    assert report(runner, PLAIN_FORWARD).chosen
    assert not report(runner, LEAN_FORWARD).chosen
    assert report(runner, LEAN_FORWARD).reason.startswith(reason)


@needs_stand_in
def test_a_wrong_one_is_passed_over(
    tmp_path: Path, on_the_stand_in: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LeanForward.__call__

    def wrong(forward: LeanForward, *arguments: Any) -> torch.Tensor:
        return right(forward, *arguments).roll(1, -1)

    monkeypatch.setattr(LeanForward, "__call__", wrong)
    runner = load("llama", tmp_path, **on_the_stand_in)
    assert isinstance(runner._forward, PlainForward)
    assert "does not give the plain model's logits" in report(runner, LEAN_FORWARD).reason


def a_lean_model(model_dir: Path) -> tuple[Any, LeanForward, int]:
    """A model, its lean forward by the twins, and the bytes of its weights before that."""
    save_random_model("qwen3", model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=ATTENTION_NAME)
    probe, num_bytes = ProbeContext(), weight_bytes(model)
    with torch.inference_mode(), attending(probe):
        model(input_ids=torch.tensor([[0, 1]]), use_cache=False)
    return model, LeanForward(model, a_kernel("triton"), probe.shapes, probe.options), num_bytes


def a_kernel(name: str) -> AttentionKernel:
    return choose_for(AttentionNeeds(torch.float32, 16), CPU, name=name, machine=CARD).kernel


def weight_bytes(model: Any) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def a_step(tokens: int) -> tuple[PackedBatch, torch.Tensor, None, dict[int, LayerCache]]:
    batch = pack([tokens], [tokens], [[1, 0]], block_tokens=16, device=CPU)
    batch.tiles = torch.tensor([[0, tokens]])
    cache = torch.full((2, 16, 2, 32), torch.nan)
    caches = {layer: LayerCache(cache.clone(), cache.clone()) for layer in range(3)}
    return batch, torch.tensor(prompt(tokens, 1)), None, caches


@torch.inference_mode()
def test_the_model_and_it_have_the_same_weights_once(tmp_path: Path) -> None:
    model, forward, num_bytes = a_lean_model(tmp_path)
    assert weight_bytes(model) == num_bytes
    for parameter in model.parameters():
        parameter.mul_(1.0 + 0.1 * torch.rand_like(parameter))
    step = a_step(20)
    plain = PlainForward(model, a_kernel("reference"))
    torch.testing.assert_close(forward(*step), plain(*step), atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_reserved_buffers_never_move(tmp_path: Path) -> None:
    _, forward, _ = a_lean_model(tmp_path)
    expected = forward(*a_step(8))
    forward.reserve(8)
    forward.reserve(4)
    kept = list(forward._kept)
    out = torch.full_like(expected, torch.nan)
    for tokens, is_used in ((9, False), (8, True)):
        for buffer in kept:
            buffer.fill_(torch.nan)
        forward(*a_step(tokens), *([out] if is_used else []))
        assert [bool(buffer.isfinite().all()) for buffer in kept] == [is_used] * len(kept)
        assert all(map(torch.Tensor.is_set_to, forward._kept, kept))
    assert torch.equal(out, expected)
