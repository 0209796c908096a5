"""Loads a model directory and verifies that the model can be served exactly.

Any causal LM that transformers can load from safetensors. Models that would run but give other tokens than
the plain model (state-space hybrids, models with masks of their own) are refused: the load ends with a short
ragged, chunked and paged run that must give the plain model's logits.
"""

from __future__ import annotations

import gc
import inspect
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from engine.messages import ModelInfo
from engine.model.attention import (
    ATTENTION_NAME,
    AttentionUnsupported,
    LayerShape,
    ProbeContext,
    attending,
)
from engine.model.cpu.choose import choose_forward as choose_on_cpu
from engine.model.cpu.choose import cpu_threads
from engine.model.device import DeviceQueues, card_name, device_of, dtype_of, prepare, why_no_room
from engine.model.forward import Checked, Forward, ForwardChoice
from engine.model.gpu.choose import choose_forward as choose_on_gpu
from engine.model.path_report import PathReport, Unsupported, attention_reports
from engine.model.runner import DEFAULT_ROWS, TorchRunner
from engine.model.self_check import check_prompts, difference_from_plain, plain_logits, spread_of_plain
from kernels.dispatch import FLASH_ATTN
from kernels.machine import AttentionNeeds, KernelMachine, first_line
from kernels.trial import choose_for

DEFAULT_BLOCK_TOKENS = 16
MAX_DIFFERENCE: dict[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
"""Relative difference (see `difference_from_plain`) that rounding explains in any model."""
MOST_SPREADS = 1.5
"""In half precision a model's rounding may explain more: so often the spread of transformers' own attentions.
Measured: ours differ from the plain one by 0.9 to 1.05 spreads, a wrong scale or window by 1.6 and more."""
STATEFUL = "Architectures with state-space, linear or otherwise stateful layers are not supported"


class ModelRefused(Exception):
    """The directory cannot be served; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that passed the check against the plain model; its KV cache is still to be sized."""

    forward: Forward
    info: ModelInfo
    shapes: dict[int, LayerShape]
    device: torch.device
    dtype: torch.dtype
    path_reports: tuple[PathReport, ...]

    @property
    def token_bytes(self) -> int:
        return token_bytes_of(self.shapes, self.dtype)

    @property
    def card_name(self) -> str:
        return card_name(self.device)

    def card_bytes(self) -> tuple[int, int]:
        """Free and in all, of the card."""
        free, card = torch.cuda.mem_get_info(self.device)
        return int(free), int(card)

    def free_beside(
        self, run: Callable[[TorchRunner], bool], *, num_blocks: int, block_tokens: int, num_rows: int
    ) -> int | None:
        """Bytes of the card that are free while `run` computes with a runner of these sizes, whose KV cache
        counts as free. None: that does not fit, or `run` failed."""
        try:
            runner = self.runner(num_blocks=num_blocks, block_tokens=block_tokens, num_rows=num_rows)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            has_run = run(runner)
            step_bytes = torch.cuda.max_memory_allocated(self.device) - before
            del runner
        except ModelRefused:
            has_run = False
        gc.collect()
        torch.cuda.empty_cache()
        return self.card_bytes()[0] - step_bytes if has_run else None

    def runner(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        num_host_blocks: int = 0,
        num_rows: int = DEFAULT_ROWS,
        context_tokens: int | None = None,
        queues: DeviceQueues | None = None,
    ) -> TorchRunner:
        """A runner of these sizes; `context_tokens` may shorten the model's, `num_rows` and `queues` are
        `TorchRunner`'s. Raises `ModelRefused`."""
        info = self.info
        if context_tokens is not None:
            info = msgspec.structs.replace(info, context_tokens=context_tokens)
        try:
            runner = TorchRunner(
                self.forward,
                info,
                self.shapes,
                dtype=self.dtype,
                device=self.device,
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                num_host_blocks=num_host_blocks,
                num_rows=num_rows,
                queues=queues,
            )
        except (MemoryError, torch.OutOfMemoryError):
            mebibytes = self.token_bytes * block_tokens / 2**20
            raise ModelRefused(
                f"{num_blocks} blocks of {mebibytes:.3g} MiB of KV cache, and {num_host_blocks} of host"
                " memory, cannot be had: name less (engine.kv_memory, engine.host_kv_blocks)"
            ) from None
        runner.path_reports = self.path_reports
        return runner


def load_model(
    model_dir: Path,
    *,
    dtype: str | None = None,
    device: str | None = None,
    check_block_tokens: int = DEFAULT_BLOCK_TOKENS,
    threads: int | None = None,
    attention: str | None = None,
    model_id: str | None = None,
    fast_paths: bool = True,
    machine: KernelMachine | None = None,
) -> LoadedModel:
    """Loads `model_dir` and checks it against the plain model, in blocks of `check_block_tokens`.

    `device` and `dtype` None: as `device_of` and `dtype_of` choose. `threads`:
    torch's intra-op threads, of the whole process. `attention`: a kernel of `kernels.dispatch`; `model_id`:
    by default the directory's name. Without `fast_paths` transformers' own pass runs. `machine` None: it is
    read from the device. Raises `ModelRefused`.
    """
    config = _read_config(model_dir)
    chosen_device, chosen_dtype = _place(device, dtype, config)
    prepare(chosen_device)
    needs = AttentionNeeds(chosen_dtype, check_block_tokens)
    try:
        choose_for(needs, chosen_device, name=attention, machine=machine)
    except ValueError as error:
        raise ModelRefused(str(error)) from None
    if threads is not None:
        torch.set_num_threads(threads)
    model = _load_weights(model_dir, config, chosen_dtype, chosen_device)
    return prepared(
        model,
        model_id or model_dir.resolve().name,
        check_block_tokens=check_block_tokens,
        attention=attention,
        fast_paths=fast_paths,
        machine=machine,
    )


def prepared(
    model: Any,
    model_id: str,
    *,
    check_block_tokens: int = DEFAULT_BLOCK_TOKENS,
    attention: str | None = None,
    fast_paths: bool = True,
    machine: KernelMachine | None = None,
) -> LoadedModel:
    """Chooses how a transformers model that is in its place is computed, as `load_model`, after `prepare`.
    Its attention must be `ATTENTION_NAME`. Raises `ModelRefused`."""
    probe = _probe(model)
    info = _describe(model, model_id)
    plain = _plain_logits(model, info)
    allowed = MAX_DIFFERENCE[model.dtype]
    if model.dtype != torch.float32:
        allowed = max(allowed, MOST_SPREADS * spread_of_plain(model, plain, check_prompts(info)))

    block_tokens = check_block_tokens if attention == FLASH_ATTN else min(check_block_tokens, 16)
    check = partial(_check_against_plain, plain, allowed, model, info, probe.shapes, block_tokens)
    needs = AttentionNeeds(model.dtype, check_block_tokens, tuple(probe.kinds))
    choose_forward = choose_on_cpu if model.device.type == "cpu" else choose_on_gpu
    refused: dict[str, str] = {}
    choice: ForwardChoice | None = None
    while choice is None:
        try:
            attended = choose_for(needs, model.device, name=attention, machine=machine, refused=refused)
            choice = choose_forward(
                model, probe.shapes, probe.options, check, attended.kernel, fast_paths=fast_paths
            )
        except Unsupported as error:
            refused[attended.kernel.name] = str(error)
        except ValueError as error:
            why = f"{next(iter(refused.values()))}. {STATEFUL}" if refused else error
            raise ModelRefused(f"{info.architecture} cannot be served: {why}") from None
    shown = f"{attended.kernel.name}: {attended.kernel.reason}"
    info = msgspec.structs.replace(info, attention=shown, forward=choice.forward.name)
    reports = (*attention_reports(attended), *choice.reports)
    reports = (*reports, cpu_threads()) if model.device.type == "cpu" else reports
    return LoadedModel(choice.forward, info, probe.shapes, model.device, model.dtype, reports)


def load_runner(
    model_dir: Path,
    *,
    num_blocks: int,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    num_host_blocks: int = 0,
    num_rows: int = DEFAULT_ROWS,
    queues: DeviceQueues | None = None,
    **options: Any,
) -> TorchRunner:
    """`load_model` with a paged cache, and host memory for swapped KV. Raises `ModelRefused`."""
    if block_tokens < 1 or num_blocks < 1:
        raise ModelRefused(f"block_tokens ({block_tokens}) and num_blocks ({num_blocks}) must be at least 1")
    if num_host_blocks < 0:
        raise ModelRefused(f"num_host_blocks ({num_host_blocks}) must not be negative")
    loaded = load_model(model_dir, check_block_tokens=block_tokens, **options)
    return loaded.runner(
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        num_host_blocks=num_host_blocks,
        num_rows=num_rows,
        queues=queues,
    )


@dataclass(frozen=True, slots=True)
class Outline:
    """What a model will need, known without its weights."""

    context_tokens: int
    token_bytes: int
    weight_bytes: int
    device: str


def outline(model_dir: Path, *, dtype: str | None = None, device: str | None = None) -> Outline:
    """Outlines a model without loading its weights: no memory is taken. Raises `ModelRefused`."""
    config = _read_config(model_dir)
    chosen_device, chosen_dtype = _place(device, dtype, config)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=chosen_dtype, attn_implementation=ATTENTION_NAME
            ).eval()
    except Exception as error:
        raise ModelRefused(f"{config.model_type} cannot be outlined: {first_line(error)}") from error
    shapes = _probe(model).shapes
    return Outline(
        _context_tokens(model.config.get_text_config()),
        token_bytes_of(shapes, chosen_dtype),
        sum(parameter.numel() for parameter in model.parameters()) * chosen_dtype.itemsize,
        chosen_device.type,
    )


def token_bytes_of(shapes: dict[int, LayerShape], dtype: torch.dtype) -> int:
    elements = sum(shape.elements_per_token for shape in shapes.values())
    return elements * int(dtype.itemsize)


def _read_config(model_dir: Path) -> Any:
    """The directory's config; checks that weights lie beside it."""
    if not model_dir.is_dir():
        raise ModelRefused(f"model directory {model_dir} does not exist")
    config_file = model_dir / "config.json"
    if not config_file.is_file():
        raise ModelRefused(f"{model_dir} has no config.json: it is not a transformers model directory")
    try:
        fields = json.loads(config_file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelRefused(f"{config_file} is not valid JSON: {error}") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ModelRefused(f"{config_file} names no model_type, so its architecture is not known")
    if not any(model_dir.glob("*.safetensors")):
        raise ModelRefused(
            f"{model_dir} has no weights: no *.safetensors file lies in it"
            " (other formats are not read; save the model with save_pretrained)"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelRefused(
            f"transformers {transformers.__version__} cannot read {config_file}"
            f" (model_type {fields['model_type']!r}): {first_line(error)}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefused(
            f"{config.model_type} is an encoder-decoder; only causal language models are served"
        )
    return config


def _place(device: str | None, dtype: str | None, config: Any) -> tuple[torch.device, torch.dtype]:
    own = str(getattr(config.get_text_config(), "dtype", None) or config.dtype).removeprefix("torch.")
    try:
        chosen = device_of(device)
        return chosen, dtype_of(dtype, chosen, own)
    except ValueError as error:
        raise ModelRefused(str(error)) from None


def _load_weights(model_dir: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    transformers.utils.logging.disable_progress_bar()
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelRefused(
            f"transformers {transformers.__version__} cannot load {config.model_type} from {model_dir}:"
            f" {first_line(error)}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelRefused(
            f"the weights in {model_dir} are incomplete: {len(missing)} tensors are missing,"
            f" {', '.join(missing[:3])} among them"
        )
    if device.type == "cuda":
        weight_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        problem = why_no_room(weight_bytes, torch.cuda.mem_get_info(device)[0], device)
        if problem is not None:
            raise ModelRefused(problem)
    return model.to(device).eval()


def _probe(model: Any) -> ProbeContext:
    """Finds each layer's shape by a tiny forward pass: heads and dims can differ by layer."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelRefused(f"{_architecture(model)} cannot be served: it only computes every token's logits")
    context = ProbeContext()
    token_ids = torch.tensor([[0, 1]], dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode(), attending(context):
            model(
                input_ids=token_ids, position_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False
            )
    except AttentionUnsupported as error:
        raise ModelRefused(f"{_architecture(model)} cannot be served: {error}") from None
    except Exception as error:
        raise ModelRefused(f"{_architecture(model)} does not run: {first_line(error)}") from error
    if not context.shapes:
        raise ModelRefused(
            f"{_architecture(model)} cannot be served: it does not use transformers' attention"
            " interface (a state-space model, or an architecture with an attention of its own)"
        )
    return context


def _plain_logits(model: Any, info: ModelInfo) -> list[torch.Tensor]:
    try:
        return plain_logits(model, check_prompts(info))
    except Exception as error:
        raise ModelRefused(f"{info.architecture} does not run: {first_line(error)}") from error


def _check_against_plain(
    plain: list[torch.Tensor],
    allowed: float,
    model: Any,
    info: ModelInfo,
    shapes: dict[int, LayerShape],
    block_tokens: int,
    forward: Forward,
) -> Checked:
    """Checks twice: the first run compiles, the second is timed."""
    dtype: torch.dtype = model.dtype
    seconds = math.inf
    try:
        for _ in range(2):
            started_s = time.perf_counter()
            difference = difference_from_plain(
                forward, plain, info, shapes, dtype=dtype, device=model.device, block_tokens=block_tokens
            )
            seconds = min(seconds, time.perf_counter() - started_s)
    except Exception as error:
        return Checked(f"its self-check did not run: {first_line(error)}", seconds)
    if difference <= allowed:
        return Checked(None, seconds)
    return Checked(
        "batched and paged it does not give the plain model's logits"
        f" (relative difference {difference:.2g}, allowed {allowed:.2g})",
        seconds,
    )


def _describe(model: Any, model_id: str) -> ModelInfo:
    return ModelInfo(
        model_id=model_id,
        architecture=_architecture(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        context_tokens=_context_tokens(model.config.get_text_config()),
        vocabulary=model.get_input_embeddings().weight.shape[0],
        eos_token_ids=_eos_token_ids(model),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention="",
    )


def _architecture(model: Any) -> str:
    return type(model).__name__


def _context_tokens(config: Any) -> int:
    """The longest context for which the model is exact. Chunked attention and position scalings that depend
    on the longest sequence of a batch are exact only up to the length at which they set in."""
    limits = [getattr(config, "max_position_embeddings", None), getattr(config, "attention_chunk_size", None)]
    scalings = getattr(config, "rope_parameters", None) or {}
    for scaling in (scalings, *(value for value in scalings.values() if isinstance(value, dict))):
        if scaling.get("rope_type") in ("dynamic", "longrope"):
            limits.append(scaling.get("original_max_position_embeddings"))
            limits.append(getattr(config, "original_max_position_embeddings", None))
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    if not known:
        raise ModelRefused(f"{config.model_type}'s config.json does not say how long a context may be")
    return min(known)


def _eos_token_ids(model: Any) -> list[int]:
    """From generation_config.json, else from config.json; a list, a number or nothing."""
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return [int(token) for token in (value if isinstance(value, list | tuple) else [value])]
    return []
