"""Operators of torch, as the stand-in device needs to know them: what each does there, writes and returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

ONE_KERNEL = ("linear", "matmul", "scaled_dot_product_attention", "rms_norm")
"""Operators that torch can put together from others, and a GPU has as one."""
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
MOST_SHAPES = 20_000
WAYS = {
    "copy_": "copy", "_to_copy": "convert", "detach_": "keep", "histc": "histogram",
    "index": "index", "index_put": "index", "index_put_": "index",
    "empty": "allocate", "empty_strided": "allocate", "empty_like": "allocate", "new_empty": "allocate",
    "new_empty_strided": "allocate",
}  # fmt: skip
_shapes: dict[Any, Any] = {}


@cache
def way_of(func: Any) -> str:
    """The method of `StandIn` that does it."""
    if func._opname in WAYS:
        return WAYS[func._opname]
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func} changes a tensor's shape in place")
    kind = "CompositeImplicitAutograd"
    if func._opname not in ONE_KERNEL and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kind):
        return "decompose"
    if func.is_view:
        return "view"
    return "wait" if WAITING & set(func.tags) else "launch"


@cache
def written_by(func: Any) -> list[tuple[int, str]] | None:
    """The arguments, by place and name, that it writes and returns; None: it returns new tensors."""
    places = {
        frozenset(argument.alias_info.before_set): (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info
    }
    returned = [each.alias_info for each in func._schema.returns]
    return None if None in returned else [places[frozenset(each.before_set)] for each in returned]


def each_tensor(result: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """An operator's result, each tensor changed."""
    if isinstance(result, torch.Tensor):
        return change(result)
    if not isinstance(result, list | tuple):
        return result
    return type(result)(each_tensor(part, change) for part in result)


def fill(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif target is not None:
        list(map(fill, target, source))


def garbage_like(func: Any, values: list[Any], named: dict[str, Any]) -> Any:
    """Garbage of its results' shapes, which computing with zeros tells."""
    key = (func, _key(values), _key(list(named.items())))
    if key not in _shapes:
        if len(_shapes) > MOST_SHAPES:
            _shapes.clear()
        zeros, named_zeros = tree_map_only(torch.Tensor, torch.zeros_like, (values, named))
        if func is torch.ops.aten.repeat_interleave.Tensor:
            zeros[0][:1] = named["output_size"]
        _shapes[key] = each_tensor(func(*zeros, **named_zeros), lambda result: result.to("meta"))
    return each_tensor(_shapes[key], lambda shape: spoil(torch.empty_like(shape, device="cpu")))


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else (type(value), value)


def spoil(memory: torch.Tensor) -> torch.Tensor:
    """Fills it with garbage: NaN, or no valid index."""
    garbage = float("nan") if memory.is_floating_point() else -999_999 if memory.itemsize > 2 else -99
    return memory.fill_(garbage)
