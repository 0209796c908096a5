"""Linear layers over weights packed for oneDNN.

Faster for narrow float32 products than torch's path through MKL, one layout for every number of rows, and a
row's bits do not depend on the others. The calls are private to torch, so a probe on random numbers compares
results and times first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from engine.model.path_report import Unsupported

PACKED_FOR_ROWS = 8
"""A layout made for eight rows or more serves any number of them; one made for a single row does not."""
PROBED_ROWS = (1, 2, 3, 5, 8, 17, 33, 64)
TIMED_ROWS = (1, 8, 32)
TIMED_RUNS = 9
MAX_SLOWDOWN = 1.5
NEGLIGIBLE_S = 100e-6
"""Packed products are refused where they are slower by the factor and, over the timed runs, by the time: for
matrices so small that the call itself dominates, bits that do not depend on the number of rows are worth
more. Both bounds are wide, so that a busy machine does not change the choice."""
MAX_DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative difference of a packed product from the plain one."""


@dataclass(frozen=True, slots=True)
class PackedVerdict:
    """Result of the probe for one shape of weights."""

    same_bits: bool
    """A row's result does not depend on the number of rows (given `pad_single`)."""
    pad_single: bool
    """A single row takes another path in oneDNN and is doubled."""
    plain_s: float
    packed_s: float
    """Sum of the fastest runs with each of `TIMED_ROWS`."""

    @property
    def speedup(self) -> float:
        return self.plain_s / self.packed_s

    @property
    def is_slow(self) -> bool:
        return self.packed_s > max(MAX_SLOWDOWN * self.plain_s, self.plain_s + NEGLIGIBLE_S)


class PackedLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer over a packed weight. Replaces `torch.nn.Linear`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, pad_single: bool) -> None:
        """`weight` is `[outputs, inputs]` and is not kept."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR_ROWS)
        self._bias = None if bias is None else bias.detach()
        self._pad_single = pad_single

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., inputs]` -> `[..., outputs]`."""
        if self._pad_single and rows.numel() == self.in_features:
            doubled = rows.reshape(1, -1).expand(2, -1).contiguous()
            return self._multiply(doubled)[:1].view(*rows.shape[:-1], self.out_features)
        return self._multiply(rows)

    def plain_weight(self) -> torch.Tensor:
        weight: torch.Tensor = self._packed.to_dense()
        return weight

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return product


_verdicts: dict[tuple[int, int, torch.dtype, int], PackedVerdict] = {}


def probe_packed(weight: torch.Tensor) -> PackedVerdict:
    """Tries packed products with random weights of this one's shape and dtype. Results are cached. Raises
    `Unsupported` when they do not exist here, differ from the plain product, or are slower."""
    outputs, inputs = weight.shape
    key = (outputs, inputs, weight.dtype, torch.get_num_threads())
    if key not in _verdicts:
        _verdicts[key] = _probe(outputs, inputs, weight.dtype)
    verdict = _verdicts[key]
    if verdict.is_slow:
        raise Unsupported(
            f"products with a {outputs} x {inputs} weight would take {1 / verdict.speedup:.1f} times as long"
        )
    return verdict


def _probe(outputs: int, inputs: int, dtype: torch.dtype) -> PackedVerdict:
    if dtype not in MAX_DIFFERENCE:
        raise Unsupported(f"{str(dtype).removeprefix('torch.')} weights are not packed")
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        raise Unsupported(f"torch {torch.__version__} has no packed products here")
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    rows = torch.randn(max(PROBED_ROWS), inputs, generator=generator).to(dtype)
    with torch.inference_mode():
        try:
            packed = PackedLinear(weight, bias, pad_single=False)
            whole = packed.forward(rows)
            plain_weight = packed.plain_weight()
        except (RuntimeError, AttributeError, TypeError) as error:
            raise Unsupported(f"packed products fail here ({str(error).splitlines()[0]})") from None
        expected = linear(rows.float(), weight.float(), bias.float())
        difference = float((whole.float() - expected).norm() / expected.norm())
        if not difference <= MAX_DIFFERENCE[dtype]:
            raise Unsupported(f"packed products differ from plain ones by {difference:.1e}")
        if not torch.equal(plain_weight, weight):
            raise Unsupported("a packed weight cannot be unpacked again")
        differing = [
            count
            for count in PROBED_ROWS
            if not torch.equal(packed.forward(rows[:count].clone()), whole[:count])
        ]
        timed = [rows[:count].clone() for count in TIMED_ROWS]
        plain_s = math.fsum(fastest_s(partial(linear, part, weight, bias)) for part in timed)
        packed_s = math.fsum(fastest_s(partial(packed.forward, part)) for part in timed)
    return PackedVerdict(
        same_bits=not set(differing) - {1},
        pad_single=differing == [1],
        plain_s=plain_s,
        packed_s=packed_s,
    )


def fastest_s(call: Callable[[], Any]) -> float:
    """Duration of the fastest of a few runs: other load on the machine only adds time."""
    call()
    best_s = math.inf
    for _ in range(TIMED_RUNS):
        started_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


class PackedModules:
    """Replaces a model's linear layers by packed ones; `undo` restores them."""

    def __init__(self) -> None:
        self._replaced: list[tuple[torch.nn.Module, str, Any, PackedLinear]] = []
        self.verdicts: list[PackedVerdict] = []
        self.skipped: dict[str, int] = {}

    @staticmethod
    def of(model: torch.nn.Module) -> PackedModules:
        """Replaces every `Linear` (and GPT-2's `Conv1D`) that the probe accepts. A weight shared with the
        embedding is kept; any other is dropped once it is packed."""
        done = PackedModules()
        embeddings = {
            id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
        }
        for parent in list(model.modules()):
            for name, module in list(parent.named_children()):
                transposed = type(module).__name__ == "Conv1D"
                if type(module) is not torch.nn.Linear and not transposed:
                    continue
                weight = module.weight.t() if transposed else module.weight
                try:
                    verdict = probe_packed(weight)
                except Unsupported as reason:
                    done.skipped[str(reason)] = done.skipped.get(str(reason), 0) + 1
                    continue
                packed = PackedLinear(weight, module.bias, pad_single=verdict.pad_single)
                setattr(parent, name, packed)
                if id(module.weight) not in embeddings:
                    module.weight.data = weight.new_empty(0)
                done._replaced.append((parent, name, module, packed))
                done.verdicts.append(verdict)
        return done

    @property
    def count(self) -> int:
        return len(self._replaced)

    def undo(self) -> None:
        for parent, name, module, packed in self._replaced:
            if not module.weight.numel():
                weight = packed.plain_weight()
                module.weight.data = weight.t() if type(module).__name__ == "Conv1D" else weight
            setattr(parent, name, module)
        self._replaced.clear()
