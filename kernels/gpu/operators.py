"""The operators of the GPU's forward pass, registered with torch: `torch.ops.fairgate`.

Each writes into tensors that it is given and allocates no result, so that it can be part of a captured
graph. On CUDA it launches the Triton kernels of the file of its name, elsewhere its twin in
`kernels.reference` computes. A token whose context is 0 is padding: nothing is read or written for it but
zeros of an attention's output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from kernels import reference

SCHEMAS = {
    "decode_attention": "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor tables, Tensor starts,"
    " Tensor contexts, Tensor(a!) out, float scale, int window, float softcap, Tensor? sinks) -> ()",
    "varlen_attention": "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor tables, Tensor starts,"
    " Tensor contexts, Tensor tiles, Tensor(a!) out, float scale, int window, float softcap, Tensor? sinks)"
    " -> ()",
    "rotary_write": "(Tensor(a!) qkv, Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor cosines,"
    " Tensor sines, Tensor contexts, Tensor slots, Tensor? query_norm, Tensor? key_norm, float epsilon)"
    " -> ()",
    "write_slots": "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots)"
    " -> ()",
    "add_norm": "(Tensor? delta, Tensor(a!) residual, Tensor weight, Tensor(b!) out, float epsilon) -> ()",
    "silu_multiply": "(Tensor gate_up, Tensor(a!) out) -> ()",
    "draw": "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds,"
    " Tensor token_index, int fallback, Tensor(a!) token_ids, Tensor(b!) unsound) -> ()",
}
"""By name. Shapes and meaning are with the twin of the name in `kernels.reference`."""
interpreted = False
"""Whether on a CPU Triton's interpreter takes the place of the twins; tests switch it on."""
_library = torch.library.Library("fairgate", "DEF")


def _compiled(name: str) -> Callable[..., None]:
    """The function that launches the Triton kernels: `kernels.gpu.NAME.NAME`."""
    launched: Callable[..., None] = getattr(import_module(f"kernels.gpu.{name}"), name)
    return launched


def _on_cuda(name: str, *arguments: Any) -> None:
    _compiled(name)(*arguments)


def _elsewhere(name: str, *arguments: Any) -> None:
    (_compiled(name) if interpreted else getattr(reference, name))(*arguments)


for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, partial(_on_cuda, _name), "CUDA")
    _library.impl(_name, partial(_elsewhere, _name), "CPU")
    _library.impl(_name, lambda *arguments: None, "Meta")
