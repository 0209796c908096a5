"""GPUs, models, and the step times that follow from them.

A roofline (Williams, Waterman and Patterson, CACM 2009; `docs/simulating.md`). With tensor parallelism
weights, KV and products are split evenly, and every layer ends with two all-reduces. A profile of a real
engine (`--profile`) is better where there is one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.messages import StepTime
from engine.scheduling.room import attended_tokens
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import StepTimeModel
from engine.virtual.step_shapes import LinearTiming, StepShape, StepTiming

COMPUTE_SHARE = 0.6
"""Of the data sheet's FLOP/s that large products reach; vendors' own libraries reach 0.6 to 0.8."""
BANDWIDTH_SHARE = 0.8
"""Of the data sheet's bandwidth that reading weights and KV reaches."""
STEP_OVERHEAD_S = 1.5e-3
SEQUENCE_OVERHEAD_S = 10e-6
"""Sampling and text, for each sequence of a step."""
COLLECTIVE_S = 10e-6
"""Least time of an all-reduce."""
BYTES_PER_NUMBER = 2
"""bfloat16: weights, KV and activations."""
MEMORY_SHARE = 0.9
"""Of the memory that weights and KV may take."""
ACTIVATIONS_BYTES = 2 << 30
"""A GPU, beside weights and KV."""
LARGEST_TENSOR_PARALLEL = 16
GPU_BLOCK_TOKENS = 64
"""Of a KV block: what attention kernels on GPUs read in one go."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: float
    read_bytes_per_s: float
    flops_per_s: float
    """Dense, in bfloat16."""
    link_bytes_per_s: float
    """To the others of one machine, each way."""
    watts: float
    idle_watts: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H200 Tensor Core GPU data sheet (SXM): 141 GB, 4.8 TB/s, 1,979 TFLOPS BF16 with sparsity
        # (half of it without), NVLink 900 GB/s both ways together, up to 700 W.
        Gpu("h200", 141e9, 4.8e12, 989.5e12, 450e9, 700.0, 75.0),
        # NVIDIA H100 Tensor Core GPU data sheet (SXM): 80 GB, 3.35 TB/s, 1,979 TFLOPS BF16 with sparsity,
        # NVLink 900 GB/s, up to 700 W.
        Gpu("h100", 80e9, 3.35e12, 989.5e12, 450e9, 700.0, 70.0),
        # NVIDIA A100 Tensor Core GPU data sheet (80 GB, SXM): 2,039 GB/s, 312 TFLOPS BF16, NVLink 600 GB/s,
        # 400 W.
        Gpu("a100", 80e9, 2.039e12, 312e12, 300e9, 400.0, 55.0),
        # NVIDIA L40S data sheet: 48 GB, 864 GB/s, 733 TFLOPS BF16 with sparsity, PCIe Gen4 x16 64 GB/s both
        # ways, 350 W.
        Gpu("l40s", 48e9, 864e9, 366.5e12, 32e9, 350.0, 35.0),
        # One socket of a server: 8 channels of DDR5-4800 (JEDEC: 38.4 GB/s each), 32 cores with two AVX-512
        # FMA units at 2.2 GHz (64 float32 operations a cycle), 256 GB. No product's data sheet.
        Gpu("cpu", 256e9, 307.2e9, 4.5e12, 20e9, 270.0, 90.0),
    )
}
"""Idle power is not from data sheets: about what such a device draws with a model loaded."""


def _llama(layers: int, hidden: int, intermediate: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    }


MODELS = {
    # Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B.
    "1b": _llama(16, 2048, 8192, 32, 64),
    "8b": _llama(32, 4096, 14_336, 32, 128),
    "70b": _llama(80, 8192, 28_672, 64, 128),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    body_parameters: int
    head_parameters: int
    attention_width: int
    """Query heads x head size, summed over the layers."""
    kv_width: int
    """Key and value numbers kept for one token, in all layers."""

    @staticmethod
    def of(config: dict[str, Any]) -> ModelShape:
        """From a Llama-like config.json."""
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head = config.get("head_dim") or hidden // heads
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        return ModelShape(
            body_parameters=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_parameters=hidden * config["vocab_size"],
            attention_width=layers * heads * head,
            kv_width=layers * 2 * kv_heads * head,
        )

    @property
    def step_parameters(self) -> int:
        return self.body_parameters + self.head_parameters

    def prefill_flops(self, prompt_tokens: int) -> int:
        """A whole prompt, and its last token's logits."""
        attended = prompt_tokens * (prompt_tokens + 1) // 2
        return (
            2 * self.body_parameters * prompt_tokens
            + 4 * self.attention_width * attended
            + 2 * self.head_parameters
        )

    def decode_flops(self, context_tokens: int) -> int:
        return 2 * self.step_parameters + 4 * self.attention_width * context_tokens


@dataclass(frozen=True)
class Roofline:
    """A model on `gpus` GPUs together; implements `StepTiming`. Raises ValueError when it does not fit."""

    gpu: Gpu
    config: dict[str, Any]
    gpus: int = 1
    model_name: str = "model"

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= LARGEST_TENSOR_PARALLEL:
            raise ValueError(
                f"tensor parallel must be between 1 and {LARGEST_TENSOR_PARALLEL}, not {self.gpus}"
            )
        if self.kv_tokens < 1:
            raise ValueError(
                f"the weights of {self.model_name} ({self.weight_bytes / 1e9:.0f} GB) leave no room for KV in"
                f" {self.gpus} x {self.gpu.memory_bytes / 1e9:.0f} GB of {self.gpu.name}: take more GPUs "
                "(--tensor-parallel) or a smaller model (--model)"
            )

    @cached_property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.config)

    @property
    def weight_bytes(self) -> int:
        """All weights; the embedding (looked up, not multiplied) counts apart from the output's product."""
        return (self.shape.step_parameters + self.shape.head_parameters) * BYTES_PER_NUMBER

    @property
    def kv_token_bytes(self) -> int:
        return self.shape.kv_width * BYTES_PER_NUMBER

    @property
    def kv_tokens(self) -> int:
        """That the memory has room for beside the weights."""
        room = self.gpu.memory_bytes * MEMORY_SHARE - ACTIVATIONS_BYTES
        return int((self.gpus * room - self.weight_bytes) // self.kv_token_bytes)

    @property
    def context_tokens(self) -> int:
        return int(self.config["max_position_embeddings"])

    def limits_s(self, shape: StepShape) -> tuple[float, float]:
        """Seconds to compute a step's products, and to read what it reads."""
        model = self.shape
        tokens = shape.prompt_tokens + shape.decode_tokens
        flops = (
            2 * model.body_parameters * tokens
            + 2 * model.head_parameters * shape.rows
            + 4 * model.attention_width * (shape.prompt_context + shape.decode_context)
        )
        read = model.step_parameters * BYTES_PER_NUMBER + self.kv_token_bytes * shape.decode_context
        return flops / self._flops_per_s, read / self._read_bytes_per_s

    def step_s(self, shape: StepShape) -> float:
        tokens = shape.prompt_tokens + shape.decode_tokens
        return max(self.limits_s(shape)) + self._between_s(tokens, shape.rows)

    def decodes_s(self, shape: StepShape, steps: int) -> list[float]:
        model, decodes, context = self.shape, shape.decode_tokens, shape.decode_context
        between_s = self._between_s(shape.prompt_tokens + decodes, shape.rows)
        # Whole numbers as in `limits_s`, so that every step equals `step_s` to the last bit.
        per_context = 4 * model.attention_width
        flops = (
            2 * model.body_parameters * (shape.prompt_tokens + decodes)
            + 2 * model.head_parameters * shape.rows
            + per_context * shape.prompt_context
        )
        weights, kv_bytes = model.step_parameters * BYTES_PER_NUMBER, self.kv_token_bytes
        flops_per_s, read_bytes_per_s = self._flops_per_s, self._read_bytes_per_s
        return [
            max(
                (flops + per_context * attended) / flops_per_s,
                (weights + kv_bytes * attended) / read_bytes_per_s,
            )
            + between_s
            for attended in range(context, context + steps * decodes, decodes)
        ]

    @cached_property
    def _flops_per_s(self) -> float:
        return self.gpu.flops_per_s * self.gpus * COMPUTE_SHARE

    @cached_property
    def _read_bytes_per_s(self) -> float:
        return self.gpu.read_bytes_per_s * self.gpus * BANDWIDTH_SHARE

    def _between_s(self, tokens: int, rows: int) -> float:
        between_s = STEP_OVERHEAD_S + SEQUENCE_OVERHEAD_S * rows
        if self.gpus > 1:
            # A ring: each sends and receives 2 (n - 1) / n of the data.
            sent = 2 * (self.gpus - 1) / self.gpus * tokens * self.config["hidden_size"] * BYTES_PER_NUMBER
            once_s = COLLECTIVE_S + sent / self.gpu.link_bytes_per_s
            between_s += 2 * int(self.config["num_hidden_layers"]) * once_s
        return between_s


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    timing: StepTiming
    step_time: StepTime
    """The linear model that engines fit, which schedulers use for `timing`."""
    kv_tokens: int
    context_tokens: int
    max_sequences: int = 256
    max_batched_tokens: int = 2048
    block_tokens: int = 16
    gpus: int = 1
    watts: float = 0.0
    """Of each GPU when it is busy; 0: not known."""
    idle_watts: float = 0.0
    padded: bool = False
    """Shapes are padded, as on devices without ragged batches."""
    keeps_rows: bool = False
    """Padded, and a sequence that has ended keeps its row until its whole batch has."""

    @property
    def num_blocks(self) -> int:
        return max(1, self.kv_tokens // self.block_tokens)


def roofline_machine(
    gpu: str,
    model: str,
    *,
    gpus: int = 1,
    max_sequences: int = 256,
    max_batched_tokens: int = 2048,
    block_tokens: int = GPU_BLOCK_TOKENS,
    kv_tokens: int | None = None,
) -> Machine:
    """Raises ValueError for an unknown name and for weights that do not fit."""
    if gpu not in GPUS:
        raise ValueError(f"no GPU {gpu!r}; there are {', '.join(GPUS)}")
    if model not in MODELS:
        raise ValueError(f"no model {model!r}; there are {', '.join(MODELS)}")
    device = GPUS[gpu]
    roofline = Roofline(device, MODELS[model], gpus, model)
    count = f"{gpus} x " if gpus > 1 else ""
    return Machine(
        f"{model} on {count}{gpu}",
        roofline,
        fitted(roofline, max_sequences, max_batched_tokens),
        min(roofline.kv_tokens, kv_tokens or roofline.kv_tokens),
        roofline.context_tokens,
        max_sequences,
        max_batched_tokens,
        block_tokens,
        gpus,
        device.watts,
        device.idle_watts,
    )


def profile_machine(
    name: str,
    step_time: StepTime,
    *,
    kv_tokens: int,
    context_tokens: int,
    max_sequences: int,
    max_batched_tokens: int,
    block_tokens: int = 16,
    max_tokens_per_s: float = math.inf,
) -> Machine:
    return Machine(
        name,
        LinearTiming(step_time, max_tokens_per_s),
        step_time,
        kv_tokens,
        context_tokens,
        max_sequences,
        max_batched_tokens,
        block_tokens,
    )


SAMPLES = 400


def fitted(timing: StepTiming, max_sequences: int, max_batched_tokens: int) -> StepTime:
    """The linear model fitted to `SAMPLES` such steps, fixed seed; every other one with a prompt's chunk."""
    rng = random.Random(0)
    model = StepTimeModel()
    for number in range(SAMPLES):
        decodes = round(max_sequences ** rng.random())
        context = decodes * rng.randint(64, 4096)
        chunk = rng.randint(16, max(16, max_batched_tokens - DECODE_TOKENS * decodes)) if number % 2 else 0
        attended = attended_tokens(rng.randint(0, 2048), chunk)
        shape = StepShape(chunk, attended, DECODE_TOKENS * decodes, context, decodes + (chunk > 0))
        model.observe(chunk + shape.decode_tokens, attended + context, shape.rows, timing.step_s(shape))
    return model.to_message()
