"""Loading: models that cannot be served exactly are refused, with the reason and the way out."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine.core.first_steps import largest_step
from engine.model.loader import ModelRefused, Outline, load_model, load_runner, outline
from engine.model.runner import TorchRunner
from engine.virtual.replica import VirtualTexts
from kernels import reference
from kernels.dispatch import FLASH_ATTN, KERNELS, TRITON
from kernels.machine import KernelMachine
from tests.models.random_models import CONFIG_DIR, save_random_model

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_random_model("llama", tmp_path / "tiny-llama")


def refusal(model_dir: Path, **options: Any) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_runner(model_dir, **{"device": "cpu", "num_blocks": 8, **options})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_loaded_model_says_what_it_is(llama: Path) -> None:
    runner = load_runner(llama, device="cpu", num_blocks=8)
    info = runner.info
    assert (info.model_id, info.architecture) == ("tiny-llama", "LlamaForCausalLM")
    assert (info.context_tokens, info.vocabulary, info.eos_token_ids) == (256, 500, [2])
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.parameters == sum(
        tensor.numel() for tensor in safetensors.torch.load_file(llama / "model.safetensors").values()
    )
    assert info.attention.startswith("numba: ")
    assert (runner.num_blocks, runner.block_tokens) == (8, 16)
    assert load_runner(llama, device="cpu", num_blocks=8, model_id="mine").info.model_id == "mine"


def test_end_of_sequence_tokens_come_from_the_generation_config_first(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_runner(llama, num_blocks=8, device="cpu").info.eos_token_ids == [7, 8]
    (llama / "generation_config.json").unlink()
    assert load_runner(llama, num_blocks=8, device="cpu").info.eos_token_ids == [2]


def test_a_model_is_outlined_without_its_weights_as_it_is_loaded(llama: Path) -> None:
    loaded = load_model(llama, device="cpu")
    # 3 layers x (keys + values) x 2 heads x 16 dims x 4 bytes = 768 bytes a token.
    assert outline(llama, device="cpu") == Outline(256, 768, loaded.info.parameters * 4, "cpu")
    assert (loaded.info.context_tokens, loaded.token_bytes) == (256, 768)
    assert outline(llama, device="cpu", dtype="bfloat16").token_bytes == 384


def test_a_shorter_context_is_what_the_runner_says(llama: Path) -> None:
    runner = load_model(llama, device="cpu").runner(num_blocks=8, block_tokens=4, context_tokens=33)
    assert (runner.info.context_tokens, runner.block_tokens, runner.num_host_blocks) == (33, 4, 0)


def test_what_is_free_beside_a_step_is_measured_with_its_kv_cache_gone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, made, gone = load_model(llama, device="cpu"), [], []
    cuda = {
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 1000,
        "max_memory_allocated": lambda device: 1700,
        "empty_cache": lambda: gone.append(made[-1]() is None),
        "mem_get_info": lambda device: (9000, 10_000),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)

    def run(runner: TorchRunner) -> bool:
        made.append(weakref.ref(runner))
        return largest_step(runner, VirtualTexts(), [20, 1])

    gc.disable()  # as while an engine starts
    assert loaded.free_beside(run, num_blocks=4, block_tokens=16, num_rows=4) == 9000 - 700
    assert gone == [True]
    assert loaded.free_beside(run, num_blocks=1, block_tokens=16, num_rows=4) is None, "too few blocks"
    gc.enable()


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unusual_attention_passes_the_self_check(name: str, dtype: str, tmp_path: Path) -> None:
    """Softcap and windows by layer; sinks; keys wider than values."""
    runner = load_runner(save_random_model(name, tmp_path / name), dtype=dtype, device="cpu", num_blocks=8)
    assert runner.info.dtype == dtype


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != FLASH_ATTN])
def test_every_kernel_passes_the_self_check(kernel: str, tmp_path: Path) -> None:
    model_dir = save_random_model("mistral", tmp_path / "mistral")
    machine = KernelMachine("cuda", (9, 0)) if kernel == TRITON else None  # its twins are on every device
    runner = load_runner(model_dir, device="cpu", num_blocks=8, attention=kernel, machine=machine)
    assert runner.info.attention.startswith(f"{kernel}: ")


def test_threads_are_set(llama: Path) -> None:
    torch.set_num_threads(2)
    load_runner(llama, device="cpu", num_blocks=8, threads=1)
    assert torch.get_num_threads() == 1


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing") == f"model directory {tmp_path / 'nothing'} does not exist"


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "\xff", "[]", "{}"])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    message = refusal(tmp_path)
    assert "config.json is not valid JSON" in message or "names no model_type" in message


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIG_DIR / "llama.json").read_text())
    assert "has no weights: no *.safetensors file" in refusal(tmp_path)


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "perpetuum_mobile"}))
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert "cannot read" in message
    assert "'perpetuum_mobile'" in message


@pytest.mark.parametrize("model_type", ["t5", "clip"])
def test_what_is_no_causal_language_model(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    safetensors.torch.save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert model_type in message
    assert "causal language models" in message or "cannot load" in message


def test_weights_that_are_damaged(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"not a safetensors file at all")
    assert "cannot load llama" in refusal(llama)


def test_weights_of_which_some_are_missing(llama: Path) -> None:
    tensors = safetensors.torch.load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    message = refusal(llama)
    assert "incomplete: 1 tensors are missing" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "does not use transformers' attention interface"),
        ("bloom", "does not use transformers' attention interface"),
        ("trocr", "only computes every token's logits"),
        ("jamba", "does not give the plain model's logits"),
        ("qwen3_next", "does not give the plain model's logits"),
    ],
)
def test_an_architecture_that_would_be_silently_wrong(name: str, reason: str, tmp_path: Path) -> None:
    message = refusal(save_random_model(name, tmp_path / name))
    assert reason in message
    assert "cannot be served" in message


def test_a_model_that_is_not_causal(tmp_path: Path) -> None:
    """transformers can make a decoder look both ways by its config; a paged cache cannot."""
    model_dir = save_random_model("llama", tmp_path / "both-ways")
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    assert "cannot be served" in refusal(model_dir)


def test_a_kernel_that_forgets_the_window_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = reference.paged_attention

    def forgetful(*arguments: Any, **options: Any) -> torch.Tensor:
        return attend(*arguments, **{**options, "sliding_window": None})

    monkeypatch.setitem(KERNELS, "reference", replace(KERNELS["reference"], attend=forgetful))
    model_dir = save_random_model("mistral", tmp_path / "mistral")
    message = refusal(model_dir, attention="reference")
    assert "attention kernel 'reference' cannot run: it differs from the reference by" in message
    monkeypatch.setattr(reference, "paged_attention", forgetful)  # so that the trial sees no difference
    assert "does not give the plain model's logits" in refusal(model_dir, attention="reference")


@pytest.mark.parametrize("machine", [None, KernelMachine("cuda", (9, 0))])
def test_a_kernel_that_is_wrong_in_the_model_alone_is_passed_over(
    machine: KernelMachine | None, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is wrong in a cache of the size that the check of this model has."""

    def broken(query: torch.Tensor, keys: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        right = reference.paged_attention(query, keys, *rest, **options)
        return right + 0.1 if keys.shape[0] == 2 * 11 else right

    for name in ("numba", "triton"):
        monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], attend=broken))
    wrong = "numba" if machine is None else "triton"
    options: dict[str, Any] = {"block_tokens": 4, "fast_paths": False, "machine": machine}
    runner = load_runner(llama, device="cpu", num_blocks=8, **options)
    assert runner.info.attention.startswith("torch-sdpa: the fastest kernel")
    [report] = [each for each in runner.path_reports if each.name == f"attention {wrong}"]
    assert str(report).startswith(f"attention {wrong}: not used, batched and paged it does not give the")
    assert "batched and paged it does not give" in refusal(llama, attention=wrong, **options)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many layers of wide weights that in bfloat16 rounding alone passes the fixed bound."""
    model_dir = tmp_path_factory.mktemp("deep") / "deep-mistral"
    return save_random_model("mistral", model_dir, num_hidden_layers=16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_correct_model_that_rounding_moves_far_is_served(deep: Path, dtype: str) -> None:
    assert (
        load_runner(deep, device="cpu", num_blocks=8, dtype=dtype, attention="torch-sdpa").info.dtype == dtype
    )


@pytest.mark.parametrize("layers", [3, 16])
@pytest.mark.parametrize("wrong", ["window", "scale"])
def test_a_wrong_attention_is_refused_in_half_precision_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: Path, layers: int, wrong: str
) -> None:
    attend = reference.paged_attention

    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        changed = {"sliding_window": None} if wrong == "window" else {"scale": 1.08 * options["scale"]}
        return attend(*arguments, **{**options, **changed})

    monkeypatch.setitem(KERNELS, "reference", replace(KERNELS["reference"], attend=broken))
    monkeypatch.setattr(reference, "paged_attention", broken)  # so that the trial sees no difference
    model_dir = deep if layers == 16 else save_random_model("mistral", tmp_path / "mistral")
    message = refusal(model_dir, dtype="bfloat16", attention="reference")
    assert "does not give the plain model's logits (relative difference" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash"}, "attention kernel 'flash' is not known"),
        ({"dtype": "int4"}, "dtype 'int4' is not served; use one of float32, bfloat16, float16"),
        ({"device": "abacus"}, "device 'abacus' is not known"),
        ({"num_blocks": 0}, "num_blocks (0) must be at least 1"),
        ({"block_tokens": 0}, "block_tokens (0)"),
    ],
)
def test_options_that_make_no_sense(llama: Path, options: dict[str, Any], message: str) -> None:
    assert message in refusal(llama, **options)


def test_positions_that_scale_with_the_longest_sequence_of_a_batch_bound_the_context(tmp_path: Path) -> None:
    model_dir = save_random_model("llama", tmp_path / "dynamic")
    config = json.loads((model_dir / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    (model_dir / "config.json").write_text(json.dumps(config))
    assert load_runner(model_dir, device="cpu", num_blocks=8).info.context_tokens <= 64


def test_transformers_does_not_take_our_kernels_for_its_own(llama: Path) -> None:
    """transformers probes for Hugging Face's package `kernels`, and finds ours on the path."""
    script = (
        "import sys, pathlib, transformers.modeling_utils\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available(), 'ours was taken for Hugging Face\\'s'\n"
        "from engine.model.loader import load_runner\n"
        "import kernels\n"
        "assert pathlib.Path(kernels.__file__).parent == pathlib.Path.cwd() / 'kernels'\n"
        "print(load_runner(pathlib.Path(sys.argv[1]), device='cpu', num_blocks=8).info.architecture)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(llama)], cwd=REPOSITORY, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "LlamaForCausalLM"


def test_the_package_that_transformers_probes_is_empty() -> None:
    assert (REPOSITORY / "kernels" / "__init__.py").read_text() == ""
