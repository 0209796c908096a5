"""A stand-in for a GPU: a torch backend in Python whose tensors hold CPU memory and say they are elsewhere.

Inside `with StandIn():` tensors can be made on, moved to and computed on `DEVICE`. Mixing devices raises.
Every launch, copy and wait is counted with its file and line. Memory that was not written holds garbage.
With `late` what was launched runs only when it is waited for: a staging buffer written again too early and a
result read too early show. Needs torch's `_setup_privateuseone_for_python_backend`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from tests.support.stand_in_streams import Stream, active, current, where

HAS_STAND_IN = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
needs_stand_in = pytest.mark.skipif(
    not HAS_STAND_IN, reason=f"torch {torch.__version__} has no backends in Python: no stand-in device"
)
DEVICE = torch.device("privateuseone", 0)
"""Called "standin:0" once a `StandIn` was entered."""
ONE_KERNEL = ("linear", "matmul", "scaled_dot_product_attention", "rms_norm")
"""Operators that torch can put together from others, and a GPU has as one."""
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
MOST_SHAPES = 20_000
aten = torch.ops.aten
_shapes: dict[Any, Any] = {}


def spoil(memory: torch.Tensor) -> torch.Tensor:
    """Fills it with garbage: NaN, or no valid index."""
    return memory.fill_(
        float("nan") if memory.is_floating_point() else -999_999 if memory.itemsize > 2 else -99
    )


class StandInTensor(torch.Tensor):
    """A tensor on the stand-in; `memory` is where its numbers are."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> StandInTensor:
        made: StandInTensor = torch.Tensor._make_wrapper_subclass(
            cls, memory.size(), strides=memory.stride(), storage_offset=memory.storage_offset(),
            dtype=memory.dtype, device=DEVICE,
        )  # fmt: skip
        return made

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return current().run(func, args, kwargs or {})

    def __repr__(self, **options: Any) -> str:
        return f"StandInTensor({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()


class StandIn:
    """The device, for the duration of a `with`. Tensors outlive it: another `StandIn` can go on with them."""

    def __init__(self, *, late: bool = False, launch_ms: float = 1.0) -> None:
        self.late = late
        self.launch_ms = launch_ms
        self.host_ms = 0.0
        """The host's virtual time; a test may add what the host takes."""
        self.lost: Exception | None = None
        """What every launch, copy and wait raises from now on."""
        self.current_stream = Stream(self)
        self._failure: tuple[Exception, int, bool] | None = None
        self.reset()

    def reset(self) -> None:
        """Begins to count anew: launches and waits by "file:line operator", copies by "file:line"."""
        self.launches, self.waits, self.event_waits = Counter[str](), Counter[str](), Counter[str]()
        self.copies_to_device, self.bytes_to_device = Counter[str](), Counter[str]()
        self.copies_to_host, self.bytes_to_host = Counter[str](), Counter[str]()
        self.views = 0

    def __enter__(self) -> StandIn:
        _backend()
        active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self.lost is None:
                self.current_stream.finish()
        finally:
            active.remove(self)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Queues on `stream` what is launched meanwhile."""
        before, self.current_stream = self.current_stream, stream
        try:
            yield
        finally:
            self.current_stream = before

    def unexpected_waits(self) -> list[str]:
        """All waits but those for events, each "file:line operator"."""
        return sorted(self.waits)

    def fail_next(self, error: Exception, *, after: int = 0, lost: bool = False) -> None:
        """Lets a launch fail, the one after the next `after`; if the device is `lost`, all that follows, too.
        Under late execution the wait raises it; an `OutOfMemoryError` always comes at the launch."""
        self._failure = (error, after, lost)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        way = _way_of(func)
        device = kwargs.get("device", DEVICE) or DEVICE
        if device.type != DEVICE.type and way in (StandIn.launch, StandIn.allocate):
            return func(*self._memory_of(func, args), **kwargs)  # a tensor elsewhere, like one here
        return way(self, func, args, kwargs)

    def launch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        values, named = self._memory_of(func, args), self._memory_of_named(func, kwargs)
        self.launches[f"{where()} {func._opname}"] += 1
        self._meet_failure()
        written = _written(func)
        if written is not None:
            self.current_stream.put(partial(func, *values, **named), self.launch_ms)
            found = [args[place] if place < len(args) else kwargs[name] for place, name in written]
            return found[0] if len(found) == 1 else found or None
        if not self.late:
            results: list[Any] = []
            self.current_stream.put(lambda: results.append(func(*values, **named)), self.launch_ms)
            return _wrapped(results[0])
        outputs = tree_map_only(
            torch.Tensor, lambda each: spoil(_empty(each, "cpu")), _shape(func, values, named)
        )

        def compute() -> None:
            computed = func(*values, **named)
            alone = isinstance(computed, torch.Tensor)
            for target, source in zip(
                *(((outputs,), (computed,)) if alone else (outputs, computed)), strict=True
            ):
                target.copy_(source)

        self.current_stream.put(compute, self.launch_ms)
        return _wrapped(outputs)

    def view(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.views += 1
        part = func(*self._memory_of(func, args), **kwargs)
        with torch.inference_mode(args[0].is_inference()):  # a view is of its base's kind
            return _wrapped(part)

    def allocate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return _wrapped(spoil(func(*self._memory_of(func, args), **self._memory_of_named(func, kwargs))))

    def wait(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the host has to know before it goes on: a number, or how large a result is."""
        self._wait_here(func._opname)
        return _wrapped(func(*self._memory_of(func, args), **kwargs))

    def copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        target, source, in_background = (*args, kwargs.get("non_blocking", False))[:3]
        if isinstance(target, StandInTensor) and isinstance(source, StandInTensor):
            return self.launch(func, args, kwargs)
        at, num_bytes = where(), source.numel() * source.element_size()
        if isinstance(target, StandInTensor):
            self.copies_to_device[at] += 1
            self.bytes_to_device[at] += num_bytes
            place, work = "device", partial(target.memory.copy_, source)
        else:
            self.copies_to_host[at] += 1
            self.bytes_to_host[at] += num_bytes
            place, work = "host", partial(target.copy_, source.memory)
            if self.late:
                spoil(target)
        self.current_stream.put(work)
        if not in_background:
            self._wait_here(f"copy to the {place}")
        return target

    def convert(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """To another dtype, or to the host."""
        if (kwargs.get("device") or DEVICE).type == DEVICE.type:
            return self.launch(func, args, kwargs)
        target = torch.empty_like(args[0].memory, dtype=kwargs.get("dtype"))
        return self.copy(func, (target, args[0]), kwargs)

    def index(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An index in host memory is copied; how many places a mask has, the host has to know."""
        places = [
            self.copy(func, (StandInTensor(torch.empty_like(place)), place), {})
            if isinstance(place, torch.Tensor) and not isinstance(place, StandInTensor)
            else place
            for place in args[1]
        ]
        masked = any(place is not None and place.dtype == torch.bool for place in places)
        fills = len(places) == 1 and len(args) > 2 and args[2].numel() == 1
        return (self.wait if masked and not fills else self.launch)(
            func, (args[0], places, *args[2:]), kwargs
        )

    def repeat(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_size_known = kwargs.get("output_size") is not None
        return (self.launch if is_size_known else self.wait)(func, args, kwargs)

    def decompose(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func.decompose(*args, **kwargs)

    def same(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args[0]

    def _memory_of(self, func: Any, values: Iterable[Any]) -> list[Any]:
        memory = []
        for value in values:
            if isinstance(value, StandInTensor):
                value = value.memory
            elif isinstance(value, torch.Tensor):
                if value.dim():
                    raise RuntimeError(f"{func}: tensors on the device and on the CPU; {where()}")
                value = value.clone()  # handed over as a number: read now
            elif isinstance(value, list | tuple):
                value = self._memory_of(func, value)
            elif isinstance(value, torch.device):
                value = torch.device("cpu")
            memory.append(value)
        return memory

    def _memory_of_named(self, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(kwargs, self._memory_of(func, kwargs.values()), strict=True))

    def _wait_here(self, what: str) -> None:
        self.waits[f"{where()} {what}"] += 1
        self.current_stream.finish()

    def _meet_failure(self) -> None:
        if self._failure is None:
            return
        error, after, lost = self._failure
        self._failure = (error, after - 1, lost) if after else None
        if after:
            return
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self.current_stream.put(partial(self._fail, error, lost))

    def _fail(self, error: Exception, lost: bool) -> None:
        self.lost = error if lost else None
        raise error


_WAYS: dict[str, Callable[[StandIn, Any, Any, dict[str, Any]], Any]] = {
    "copy_": StandIn.copy, "_to_copy": StandIn.convert, "detach_": StandIn.same,
    "index": StandIn.index, "index_put": StandIn.index, "index_put_": StandIn.index,
    "empty": StandIn.allocate, "empty_strided": StandIn.allocate, "empty_like": StandIn.allocate,
    "new_empty": StandIn.allocate, "new_empty_strided": StandIn.allocate,
}  # fmt: skip


@cache
def _way_of(func: Any) -> Callable[[StandIn, Any, Any, dict[str, Any]], Any]:
    if func._opname in _WAYS:
        return _WAYS[func._opname]
    if func is aten.repeat_interleave.Tensor:
        return StandIn.repeat
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func} changes a tensor's shape in place")
    kind = "CompositeImplicitAutograd"
    if func._opname not in ONE_KERNEL and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kind):
        return StandIn.decompose
    if func.is_view:
        return StandIn.view
    return StandIn.wait if WAITING & set(func.tags) else StandIn.launch


@cache
def _written(func: Any) -> list[tuple[int, str]] | None:
    """The arguments, by place and name, that it writes and returns; None: it returns new tensors."""
    returned = [each.alias_info for each in func._schema.returns]
    if None in returned:
        return None
    arguments = [each for each in enumerate(func._schema.arguments) if each[1].alias_info is not None]
    return [
        (place, argument.name)
        for alias in returned
        for place, argument in arguments
        if argument.alias_info.before_set == alias.before_set
    ]


def _wrapped(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return StandInTensor(result)
    return type(result)(map(_wrapped, result)) if isinstance(result, list | tuple) else result


def _empty(like: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)


def _shape(func: Any, values: list[Any], named: dict[str, Any]) -> Any:
    """Its results, without numbers."""
    key = (func, _key(values), _key(list(named.items())))
    if key not in _shapes:
        if len(_shapes) > MOST_SHAPES:
            _shapes.clear()
        if func is aten.repeat_interleave.Tensor:
            _shapes[key] = torch.empty(named["output_size"], dtype=values[0].dtype, device="meta")
        else:
            metas, meta_named = tree_map_only(
                torch.Tensor, lambda each: _empty(each, "meta"), (values, named)
            )
            _shapes[key] = func(*metas, **meta_named | ({"device": "meta"} if "device" in named else {}))
    return _shapes[key]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, list | tuple) else (type(value), value)


@cache
def _backend() -> Any:
    """Sets it up for the process; not as an accelerator, which torch would use in other tests."""
    module, dummy_hook = (
        backend_registration._DummyBackendModule(),
        backend_registration._DummyPrivateUse1Hook,
    )
    module.is_available, module.device_count = lambda: False, lambda: 0
    hook = type("HiddenHook", (dummy_hook,), {"is_available": lambda hook: False})
    backend_registration._setup_privateuseone_for_python_backend("standin", module, hook())
    library = torch.library.Library("aten", "IMPL")

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        return current().run(aten.copy_.default, (target, source, non_blocking), {})

    library.impl("_copy_from", copy_from, "PrivateUse1")
    for name, overload in (
        ("empty", "memory_format"), ("empty_strided", "default"), ("arange", "default"), ("arange", "start"),
        ("arange", "start_step"),
    ):  # fmt: skip
        func = getattr(getattr(aten, name), overload)
        make = partial(lambda func, *args, **kwargs: current().run(func, args, kwargs), func)
        library.impl(func.name().removeprefix("aten::"), make, "PrivateUse1")
    return library
