"""Fast paths of a model on a CPU: equal to the plain model, undone where they are not, and reported."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.messages import SamplingParams
from engine.model.cpu import choose, compiled, packed_linear
from engine.model.cpu.choose import COMPILED_FORWARD, PACKED_WEIGHTS
from engine.model.cpu.compiled import CompiledForward, probe_panels
from engine.model.cpu.packed_linear import PackedLinear, PackedModules, PackedVerdict, probe_packed
from engine.model.forward import PlainForward
from engine.model.loader import load_runner
from engine.model.path_report import PathReport, Unsupported
from engine.model.runner import TorchRunner
from tests.models.random_models import save_random_model
from tests.support.step_work import SequenceSlice, work_of

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
BLOCK_TOKENS = 4
ATTENTION = "attention numba"


REFUSED_FROM = {packed_linear: packed_linear.MAX_SLOWDOWN, compiled: compiled.MAX_SLOWDOWN}
"""How many times as long as plain products each kind of ours may take."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right must not depend on what is fast here: no probe refuses anything for its speed."""
    for module in (packed_linear, compiled, choose):
        monkeypatch.setattr(module, "MAX_SLOWDOWN", math.inf)


def refuse_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, factor in REFUSED_FROM.items():
        monkeypatch.setattr(module, "MAX_SLOWDOWN", factor)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each model is made once."""
    return tmp_path_factory.mktemp("models")


def load(name: str, folder: Path, **options: Any) -> TorchRunner:
    model_dir = folder / name
    if not model_dir.exists():
        save_random_model(name, model_dir)
    return load_runner(
        model_dir, **{"device": "cpu", "num_blocks": 128, "block_tokens": BLOCK_TOKENS, **options}
    )


def report(runner: TorchRunner, name: str) -> PathReport:
    [found] = [entry for entry in runner.path_reports if entry.name == name]
    return found


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(500) for _ in range(length)]


def piece(token_ids: list[int], first_block: int, position: int, num_tokens: int) -> SequenceSlice:
    return SequenceSlice(
        sequence_id=str(first_block), token_ids=token_ids, num_prompt_tokens=len(token_ids),
        position=position, num_tokens=num_tokens, sample=True, seed=0,
        block_table=list(range(first_block, first_block + 20)), sampling=SamplingParams(temperature=0.0),
    )  # fmt: skip


def logits(runner: TorchRunner, slices: list[SequenceSlice], rows: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return runner.logits(work_of(slices), rows)


def twin_steps() -> list[tuple[list[SequenceSlice], list[int]]]:
    """Ragged prefill, chunks with decodes, every choice of rows."""
    prompts = [prompt(37, 1), prompt(9, 2), prompt(1, 3)]
    return [
        (
            [piece(prompts[0], 0, 0, 17), piece(prompts[1], 40, 0, 9), piece(prompts[2], 80, 0, 1)],
            [16, 25, 26],
        ),
        ([piece(prompts[0], 0, 17, 1)], [0]),
        ([piece(prompts[0], 0, 18, 19)], []),
        ([piece(prompts[0], 0, 36, 1), piece(prompts[1], 40, 8, 1)], [1]),
        ([piece(prompts[1], 40, 0, 9)], list(range(9))),
    ]


@pytest.mark.parametrize("name", FAMILY)
def test_the_compiled_pass_gives_the_plain_logits(name: str, models: Path) -> None:
    ours = load(name, models, dtype="float32")
    plain = load(name, models, dtype="float32", fast_paths=False)
    assert isinstance(ours._forward, CompiledForward)
    assert isinstance(plain._forward, PlainForward)
    assert all(report(ours, each).chosen for each in (COMPILED_FORWARD, ATTENTION))
    assert [report(plain, each).reason for each in (COMPILED_FORWARD, PACKED_WEIGHTS)] == ["switched off"] * 2
    for slices, rows in twin_steps():
        got, expected = logits(ours, slices, rows), logits(plain, slices, rows)
        assert got.shape == (len(rows), 500)
        if rows:
            assert float((got - expected).norm() / expected.norm()) < 1e-5, rows


@pytest.mark.parametrize("name", FAMILY)
def test_in_half_precision_the_compiled_pass_is_no_further_from_the_truth(name: str, tmp_path: Path) -> None:
    """The truth: the same bfloat16 weights, computed in float32."""
    save_random_model(name, tmp_path / name, dtype=torch.bfloat16)
    exact = load(name, tmp_path, dtype="float32", fast_paths=False)
    plain = load(name, tmp_path, dtype="bfloat16", fast_paths=False)
    ours = load(name, tmp_path, dtype="bfloat16")
    assert isinstance(ours._forward, CompiledForward)
    errors = {"plain": 0.0, "ours": 0.0}
    for slices, rows in twin_steps():
        truth = logits(exact, slices, rows)
        for key, runner in (("plain", plain), ("ours", ours)):
            if rows:
                errors[key] += float((logits(runner, slices, rows).float() - truth).norm() / truth.norm())
            else:
                logits(runner, slices, rows)
    assert 0 < errors["ours"] < 1.2 * errors["plain"] + 1e-3, errors


@pytest.mark.parametrize("name", FAMILY)
def test_a_rows_bits_are_the_same_alone_in_company_and_in_chunks(name: str, models: Path) -> None:
    """Not close: equal. The compiled pass treats each row by itself."""
    runner = load(name, models, dtype="float32")
    assert isinstance(runner._forward, CompiledForward)
    assert "bits do not depend" in report(runner, COMPILED_FORWARD).reason
    mine, others = prompt(30, 5), [prompt(21, seed) for seed in (6, 7)]
    alone = logits(runner, [piece(mine, 0, 0, 30)], list(range(30)))
    for chunk in (1, 7, 29):
        for start in range(0, 30, chunk):
            count = min(chunk, 30 - start)
            company = [
                piece(others[0], 40, 0, 5 + start % 16),
                piece(mine, 20, start, count),
                piece(others[1], 80, 0, 21),
            ]
            first = 5 + start % 16
            got = logits(runner, company, list(range(first, first + count)))
            assert torch.equal(got, alone[start : start + count]), (chunk, start)


def test_tied_embeddings_stay_when_the_head_is_laid_out(tmp_path: Path) -> None:
    model_dir = save_random_model("llama", tmp_path / "tied")
    config = json.loads((model_dir / "config.json").read_text())
    tied = transformers.AutoModelForCausalLM.from_pretrained(model_dir, tie_word_embeddings=True)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tied.save_pretrained(tmp_path / "saved")
    assert config["vocab_size"] == 500
    runner = load_runner(
        tmp_path / "saved", device="cpu", num_blocks=32, dtype="float32", block_tokens=BLOCK_TOKENS
    )
    assert isinstance(runner._forward, CompiledForward)
    tokens = torch.tensor([prompt(12, 1)])
    with torch.inference_mode():
        expected = tied.eval()(tokens).logits[0, -1]
    got = logits(runner, [piece(tokens[0].tolist(), 0, 0, 12)], [11])[0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_weights_are_held_once(models: Path) -> None:
    """The model's own tensors are gone once the compiled pass holds them, and come back unchanged."""
    runner = load("llama", models)
    forward = runner._forward
    assert isinstance(forward, CompiledForward)
    modules = [module for product in forward.products for line in product._layers for module in line]
    assert len(modules) == 7 * 3 + 1, "of each layer, and the head"
    assert all(module.weight.numel() == 0 for module in modules)
    plain = load("llama", models, fast_paths=False)._forward._model
    forward.restore()
    before = {tensor_bytes(parameter) for parameter in plain.parameters()}
    assert {tensor_bytes(module.weight) for module in modules} <= before


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def test_a_compiled_pass_that_is_wrong_is_undone_and_the_model_served_by_the_plain_one(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        return right(self, *arguments, **options) * 1.01

    right = CompiledForward.__call__
    expected = logits(load("llama", models, fast_paths=False), [piece(prompt(9, 1), 0, 0, 9)], [8])
    monkeypatch.setattr(CompiledForward, "__call__", forgetful)
    runner = load("llama", models, dtype="float32")
    assert isinstance(runner._forward, PlainForward)
    assert not report(runner, COMPILED_FORWARD).chosen
    assert "does not give the plain model's logits" in report(runner, COMPILED_FORWARD).reason
    assert report(runner, PACKED_WEIGHTS).chosen
    got = logits(runner, [piece(prompt(9, 1), 0, 0, 9)], [8])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_products_by_panels_that_are_slow_or_of_another_type_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_slow_ones(monkeypatch)
    monkeypatch.setattr(compiled, "_times", {})
    monkeypatch.setattr(compiled, "_probe", lambda *_: (3e-3, 1e-3))
    with pytest.raises(Unsupported, match=r"products with a 8 x 4 weight would take 3\.0 times as long"):
        probe_panels(8, 4, torch.float32)
    monkeypatch.setattr(compiled, "_times", {})
    monkeypatch.setattr(compiled, "_probe", lambda *_: (9e-5, 1e-5))
    assert probe_panels(8, 4, torch.float32) == pytest.approx(1 / 9), "slower, but by next to nothing"
    monkeypatch.undo()
    with pytest.raises(Unsupported, match="float64 weights are not laid out in panels"):
        probe_panels(8, 4, torch.float64)


def test_a_product_that_was_held_up_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first timing of ours, of three numbers of rows, was held up; the second was not."""
    refuse_slow_ones(monkeypatch)
    times = iter([1.0 if index % 2 == 0 and index < 6 else 1e-3 for index in range(100)])
    monkeypatch.setattr(compiled, "fastest_s", lambda call: next(times))
    monkeypatch.setattr(compiled, "PackedLinear", None)  # as where torch does not have its private call
    assert compiled._probe(8, 4, torch.float32) == pytest.approx((3e-3, 3e-3))


def test_packed_modules_that_are_wrong_are_undone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = PackedLinear._multiply
    monkeypatch.setattr(PackedLinear, "_multiply", lambda self, rows: multiply(self, rows) * 1.01)
    monkeypatch.setattr(packed_linear, "_verdicts", {})
    monkeypatch.setitem(packed_linear.MAX_DIFFERENCE, torch.float32, 1.0)
    runner = load("gpt2", models, dtype="float32")
    assert not report(runner, COMPILED_FORWARD).chosen
    assert "gpt2 is not one of" in report(runner, COMPILED_FORWARD).reason
    assert not report(runner, PACKED_WEIGHTS).chosen
    assert runner.info.attention.startswith("numba")


def test_an_attention_kernel_that_is_wrong_gives_way_to_torchs(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels import dispatch

    numba = dispatch.KERNELS["numba"]
    wrong = replace(numba, attend=lambda *a, **o: numba.attend(*a, **o) * 1.1)
    monkeypatch.setitem(dispatch.KERNELS, "numba", wrong)
    runner = load("gpt2", models, dtype="float32")
    assert runner.info.attention.startswith("torch-sdpa")
    assert "differs from the reference by" in report(runner, ATTENTION).reason


@pytest.mark.parametrize("name", ["gpt2", "gemma", "gemma2", "gpt_oss", "deepseek_v3"])
def test_other_architectures_run_over_packed_weights(name: str, models: Path) -> None:
    runner = load(name, models, dtype="float32")
    plain = load(name, models, dtype="float32", fast_paths=False, attention="torch-sdpa")
    assert not report(runner, COMPILED_FORWARD).chosen
    assert report(runner, PACKED_WEIGHTS).chosen, report(runner, PACKED_WEIGHTS)
    slices = [piece(prompt(30, 1), 0, 0, 30), piece(prompt(3, 2), 40, 0, 3)]
    torch.testing.assert_close(
        logits(runner, slices, [29, 32]), logits(plain, slices, [29, 32]), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_packing_and_undoing_changes_no_bit(dtype: torch.dtype, transposed: bool) -> None:
    if transposed:
        layer: Any = transformers.pytorch_utils.Conv1D(40, 24)
        torch.nn.init.normal_(layer.weight)
    else:
        layer = torch.nn.Linear(24, 40)
    model = torch.nn.Sequential(layer, torch.nn.ReLU()).to(dtype)
    before, rows = layer.weight.detach().clone(), torch.randn(5, 24).to(dtype)
    with torch.inference_mode():
        expected = model(rows)
        modules = PackedModules.of(model)
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            assert "packed products fail here (" in next(iter(modules.skipped)), "a processor without AVX-512"
            assert torch.equal(model(rows), expected)
            return
        assert modules.count == 1
        assert isinstance(model[0], PackedLinear)
        assert layer.weight.numel() == 0, "the original is dropped"
        torch.testing.assert_close(model(rows), expected, atol=3e-2, rtol=3e-2)
        modules.undo()
    assert model[0] is layer
    assert torch.equal(layer.weight, before)


def test_a_single_row_that_takes_a_path_of_its_own_is_doubled() -> None:
    weight, rows = torch.randn(7, 12), torch.randn(1, 1, 12)
    doubled = PackedLinear(weight, None, pad_single=True)
    seen: list[int] = []
    multiply = doubled._multiply
    doubled._multiply = lambda part: seen.append(part.shape[0]) or multiply(part)  # type: ignore[func-returns-value, method-assign]
    torch.testing.assert_close(doubled(rows), rows @ weight.t())
    assert seen == [2]


def test_slow_or_absent_packed_products_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_slow_ones(monkeypatch)
    monkeypatch.setattr(packed_linear, "_verdicts", {})
    monkeypatch.setattr(
        packed_linear, "_probe", lambda *_: PackedVerdict(True, False, plain_s=1e-4, packed_s=1e-3)
    )
    with pytest.raises(Unsupported, match=r"products with a 8 x 4 weight would take 10\.0 times as long"):
        probe_packed(torch.zeros(8, 4))
    monkeypatch.undo()
    with pytest.raises(Unsupported, match="float64 weights are not packed"):
        probe_packed(torch.zeros(8, 4, dtype=torch.float64))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="has no packed products here"):
        packed_linear._probe(8, 4, torch.float32)


def test_rotary_positions_that_depend_on_more_run_through_transformers(tmp_path: Path) -> None:
    model_dir = save_random_model("llama", tmp_path / "dynamic")
    config = json.loads((model_dir / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    (model_dir / "config.json").write_text(json.dumps(config))
    runner = load_runner(model_dir, device="cpu", num_blocks=8, dtype="float32")
    assert "(dynamic) depend on more than the position" in report(runner, COMPILED_FORWARD).reason


def test_contexts_longer_than_the_table_of_angles(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.cpu.compiled.FIRST_POSITIONS", 8)
    runner = load("llama", models, dtype="float32")
    assert isinstance(runner._forward, CompiledForward)
    plain = load("llama", models, dtype="float32", fast_paths=False)
    slices = [piece(prompt(50, 1), 0, 0, 50)]
    torch.testing.assert_close(
        logits(runner, slices, [49]), logits(plain, slices, [49]), atol=1e-3, rtol=1e-3
    )


def test_every_report_can_be_read(models: Path) -> None:
    runner = load("llama", models)
    names = [entry.name for entry in runner.path_reports]
    assert names == [
        "attention flash-attn",
        "attention triton",
        ATTENTION,
        "sampled tokens",
        COMPILED_FORWARD,
        "threads",
    ]
    assert all(len(str(entry)) < 400 and "\n" not in str(entry) for entry in runner.path_reports)
    assert choose.cpu_threads().reason.startswith("1 for"), "Numba's start sets torch's threads as well"


def test_the_doctor_says_what_an_engine_would_do(tmp_path: Path) -> None:
    from engine.model.cpu.doctor import probe_machine

    for name, is_in_family in (("llama", True), ("gpt2", False)):
        reports = {entry.name: entry for entry in probe_machine(save_random_model(name, tmp_path / name))}
        assert reports[ATTENTION].chosen, reports[ATTENTION]
        assert reports[COMPILED_FORWARD].chosen == is_in_family, reports[COMPILED_FORWARD]
        assert "threads" in reports
    assert "names no hidden_size" in reports[PACKED_WEIGHTS].reason, "gpt2 calls it n_embd"
    llama = {entry.name: entry for entry in probe_machine(tmp_path / "llama")}
    assert "bits for any number of rows" in llama[f"{PACKED_WEIGHTS} in float32"].reason
