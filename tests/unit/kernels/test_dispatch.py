"""Which attention kernel a machine gets, and why not another; the trial."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import machine as machines
from kernels.cpu import jit
from kernels.dispatch import KERNELS, AttentionKernel, choose_attention
from kernels.machine import AttentionNeeds, KernelMachine, LayerNeeds, machine_of
from kernels.trial import choose_for, try_on

CPU = torch.device("cpu")
H100, A100, T4 = (
    KernelMachine("cuda", (9, 0), "H100"),
    KernelMachine("cuda", (8, 0), "A100"),
    KernelMachine("cuda", (7, 5), "T4"),
)
NO_GPU = KernelMachine(
    "cpu", triton="it runs on a CUDA card, and there is none", flash_attn="there is no card"
)
LAYER = LayerNeeds(4, 2, 64, 64)
HALF = AttentionNeeds(torch.bfloat16, 64, (LAYER,))
WHOLE = AttentionNeeds(torch.float32, 16, (LAYER,))
PAGES = replace(HALF, block_tokens=256)
UNEVEN = replace(PAGES, layers=(LayerNeeds(4, 2, 96, 64),))
WITH_SINKS = replace(PAGES, layers=(replace(LAYER, sinks=True),))
BY_NAME = "taken by name only (engine.attention=flash-attn)"


def with_dim(dim: int) -> AttentionNeeds:
    return replace(PAGES, layers=(LAYER, LayerNeeds(4, 2, dim, dim)))


@pytest.mark.parametrize(
    ("machine", "needs", "fails", "expected", "reasons"),
    [
        (NO_GPU, WHOLE, {}, "numba", {"triton": "it runs on a CUDA card, and there is none"}),
        (NO_GPU, replace(WHOLE, dtype=torch.float16), {}, "torch-sdpa", {"numba": "not float16"}),
        (H100, PAGES, {}, "triton", {"flash-attn": BY_NAME}),
        (A100, PAGES, {}, "triton", {"flash-attn": BY_NAME}),
        (H100, HALF, {}, "triton", {"flash-attn": "set engine.block_tokens to 256"}),
        (H100, replace(PAGES, dtype=torch.float32), {}, "triton", {"flash-attn": "not float32"}),
        (T4, HALF, {}, "torch-sdpa", {"triton": "8.0 or newer, T4 (sm_75) has less"}),
        (replace(H100, triton="no C compiler"), HALF, {}, "torch-sdpa", {"triton": "no C compiler"}),
        (replace(H100, flash_attn="No module named"), PAGES, {}, "triton", {"flash-attn": "No module named"}),
        (H100, PAGES, {"triton": "does not compile"}, "torch-sdpa", {"triton": "does not compile"}),
        (H100, PAGES, {"triton": "a", "torch-sdpa": "b"}, "reference", {"triton": "a", "torch-sdpa": "b"}),
        (H100, with_dim(512), {}, "torch-sdpa", {"triton": "up to 256 dims, not of 512"}),
        (H100, UNEVEN, {}, "triton", {"flash-attn": "as wide as values"}),
        (H100, with_dim(100), {}, "triton", {"flash-attn": "by 8 dims"}),
        (H100, WITH_SINKS, {}, "triton", {"flash-attn": "no sinks"}),
    ],
)  # fmt: skip
def test_each_machine_gets_its_best_kernel_and_a_line_for_each_one_passed_over(
    machine: KernelMachine,
    needs: AttentionNeeds,
    fails: dict[str, str],
    expected: str,
    reasons: dict[str, str],
) -> None:
    choice = choose_attention(machine, needs, lambda kernel: fails.get(kernel.name))
    passed_over = dict(choice.passed_over)
    assert choice.kernel.name == expected
    assert list(passed_over) == list(KERNELS)[: list(KERNELS).index(expected)], "all that are preferred, once"
    assert not any("\n" in reason for reason in passed_over.values())
    for name, reason in reasons.items():
        assert reason in passed_over[name]


def test_a_named_kernel_is_the_only_one_tried_and_is_refused_with_the_reason_and_the_way_out() -> None:
    tried: list[AttentionKernel] = []
    choice = choose_attention(H100, PAGES, tried.append, name="flash-attn")
    assert (choice.kernel, choice.passed_over) == (tried[0], ())
    assert (len(tried), tried[0].name, tried[0].reason) == (1, "flash-attn", "chosen by name")
    way_out = r"\(engine.attention=auto takes the best that can\)"
    with pytest.raises(
        ValueError, match=rf"'flash-attn' cannot run: .* set engine.block_tokens to 256 {way_out}"
    ):
        choose_attention(H100, HALF, tried.append, name="flash-attn")
    with pytest.raises(ValueError, match=rf"'triton' cannot run: it runs on a CUDA card, .* {way_out}"):
        choose_attention(NO_GPU, HALF, tried.append, name="triton")
    with pytest.raises(ValueError, match="'triton' cannot run: wrong result"):
        choose_attention(H100, HALF, lambda kernel: "wrong result", name="triton")
    with pytest.raises(
        ValueError, match="'flash' is not known; known are flash-attn, triton, numba, torch-sdpa"
    ):
        choose_attention(H100, HALF, tried.append, name="flash")
    assert len(tried) == 1


def test_tiles_are_those_of_the_layer_with_the_most_heads_for_a_key() -> None:
    layers = (LayerNeeds(4, 4, 64, 64), LayerNeeds(12, 4, 64, 64), LayerNeeds(8, 4, 64, 64))
    kernel = choose_attention(H100, replace(HALF, layers=layers), lambda kernel: None).kernel
    assert (kernel.tile_tokens, kernel.captures) == (32, True)
    assert "H100 (sm_90)" in kernel.reason
    assert choose_attention(NO_GPU, WHOLE, lambda kernel: None).kernel.tile_tokens == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_finds_what_is_wrong(dtype: torch.dtype) -> None:
    everything = LayerNeeds(4, 2, 16, 16, window=4096, softcap=50.0, sinks=True)
    needs = AttentionNeeds(dtype, 16, (LayerNeeds(6, 2, 16, 8), everything))
    right = KERNELS["torch-sdpa"]
    assert try_on(right, needs, CPU) is None

    def problem(**changed: Any) -> str:
        def attend(*arguments: Any, **options: Any) -> torch.Tensor:
            return right.attend(*arguments, **options | changed)

        return try_on(replace(right, attend=attend), needs, CPU) or ""

    for option in ("sliding_window", "softcap", "sinks"):
        assert "it differs from the reference by" in problem(**{option: None}), option
    assert "by nan" in problem(scale=float("nan"))
    assert "it does not run here:" in problem(unknown=1)
    forgets = replace(right, write_kv=lambda *arguments: None)  # what is not written is NaN
    assert "by nan" in (try_on(forgets, needs, CPU) or "")


def test_what_is_loaded_is_tried_on_its_device() -> None:
    choice = choose_for(AttentionNeeds(torch.float32, 16, (LAYER,)), CPU, machine=H100)
    assert choice.kernel.name == "triton", "by its twins"
    with pytest.raises(ValueError, match=r"there is none with a driver here|device is not one"):
        choose_for(WHOLE, CPU, name="triton")


def test_a_card_that_torch_cannot_use_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: 470")
    monkeypatch.setattr(machines, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    reason = machine_of(CPU).triton or ""
    assert reason.startswith("it runs on a CUDA card, and torch cannot use the one here: The NVIDIA driver")
    assert "\n" not in reason


def test_without_triton_or_a_c_compiler_a_card_has_no_kernels_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    find = machines.launching.importlib.util
    monkeypatch.setattr(find, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "cc")
    assert machine_of(cuda) == KernelMachine("cuda", (9, 0), "H100", None, machine_of(cuda).flash_attn)
    assert "pip install flash-attn" in (machine_of(cuda).flash_attn or "")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert "install gcc, or name one with CC" in (machine_of(cuda).triton or "")
    monkeypatch.setattr(find, "find_spec", lambda name: None)
    assert "pip install 'fairgate[gpu]'" in (machine_of(cuda).triton or "")


def test_without_the_systems_libgomp_numba_is_passed_over_and_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.omppool", None)  # so fails its import
    anew = importlib.util.spec_from_file_location("jit_anew", str(jit.__file__))
    assert anew is not None
    assert anew.loader is not None
    module = importlib.util.module_from_spec(anew)
    anew.loader.exec_module(module)
    assert module.numba is None
    assert "apt-get install libgomp1" in module.MISSING
    monkeypatch.setattr(jit, "MISSING", module.MISSING)
    choice = choose_attention(NO_GPU, WHOLE, lambda kernel: None)
    assert choice.kernel.name == "torch-sdpa"
    assert dict(choice.passed_over)["numba"] == module.MISSING


class Properties:
    major, minor, name = 9, 0, "H100"
