"""Roofline of this machine for a workload, and the share of it that an engine reaches.

Measured: reading a buffer as large as the weights of a decode step (a small one may lie in the cache), and
the faster of torch's matrix products. The ideal computes all prompts at the peak rate, then decodes all
unfinished requests together; a step takes the longer of reading and of computing. No engine reaches it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.simulate.machines.machines import ModelShape

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MATRIX = 2048
BATCHES = (256, 1024, 2048)
MEASURE_S = 1.0
"""How long each variant is repeated, at least once; the best repetition counts."""
MEASURE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Limits:
    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class RooflineIdeal:
    """The best that the limits allow for a workload whose requests arrive together."""

    prefill_s: float
    decode_s: float
    decode_steps: int
    memory_bound_steps: int
    output_tokens_per_s: float


def ideal(
    shape: ModelShape, limits: Limits, lengths: Sequence[tuple[int, int]], *, element_bytes: int
) -> RooflineIdeal:
    """For requests of (prompt tokens, output tokens). Prefill gives each its first token."""
    prefill_flops = sum(shape.prefill_flops(prompt) for prompt, _ in lengths)
    decode_s = 0.0
    memory_bound = 0
    steps = max(output for _, output in lengths) - 1
    for step in range(1, steps + 1):
        contexts = [prompt + step for prompt, output in lengths if output > step]
        read = (shape.step_parameters + shape.kv_width * sum(contexts)) * element_bytes
        memory_s = read / limits.read_bytes_per_s
        compute_s = sum(shape.decode_flops(context) for context in contexts) / limits.flops_per_s
        memory_bound += memory_s > compute_s
        decode_s += max(memory_s, compute_s)
    prefill_s = prefill_flops / limits.flops_per_s
    return RooflineIdeal(
        prefill_s=prefill_s,
        decode_s=decode_s,
        decode_steps=steps,
        memory_bound_steps=memory_bound,
        output_tokens_per_s=sum(output for _, output in lengths) / (prefill_s + decode_s),
    )


def measure_limits(
    *, read_bytes: int, dtype: str, device: str, threads: int, measure_s: float = MEASURE_S
) -> Limits:
    """Measures in a process of its own. Raises RuntimeError with the end of its stderr."""
    asked = json.dumps([read_bytes, dtype, device, threads, measure_s])
    done = subprocess.run(
        [sys.executable, "-m", "ops.bench.engine.roofline", asked],
        capture_output=True,
        text=True,
        timeout=MEASURE_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-3:]))
    return Limits(**json.loads(done.stdout))


def _measure(read_bytes: int, dtype_name: str, device: str, threads: int, seconds: float) -> Limits:
    import torch

    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)

    def best_s(work: Any) -> float:
        best = float("inf")
        until = time.perf_counter() + seconds
        while best == float("inf") or time.perf_counter() < until:
            started = time.perf_counter()
            work()
            if device != "cpu":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        return best

    with torch.inference_mode():
        # Summing reads every byte and writes next to none; a copy would also count what it writes.
        buffer = torch.ones(max(1, read_bytes // 4), dtype=torch.float32, device=device)
        reads = buffer.numel() * 4 / best_s(buffer.sum)
        weight = torch.randn(MATRIX, MATRIX, device=device).to(dtype)
        flops = 0.0
        for batch in BATCHES:
            inputs = torch.randn(batch, MATRIX, device=device).to(dtype)
            works = [lambda inputs=inputs: torch.nn.functional.linear(inputs, weight)]
            packed = _packed(torch, inputs, weight) if device == "cpu" else None
            if packed is not None:
                works.append(packed)
            flops = max(flops, *(2 * batch * MATRIX * MATRIX / best_s(work) for work in works))
    return Limits(read_bytes_per_s=reads, flops_per_s=flops)


def _packed(torch: Any, inputs: Any, weight: Any) -> Any:
    """The product with a weight that oneDNN laid out beforehand; None where torch does not have it."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, inputs.shape[0])
        torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return lambda: torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")


def main() -> None:
    print(json.dumps(asdict(_measure(*json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
