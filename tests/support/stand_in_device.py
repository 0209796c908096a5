"""A stand-in for a GPU: a torch backend in Python whose tensors hold CPU memory and say they are elsewhere.

Inside `with StandIn():` tensors can be made on, moved to and computed on `DEVICE`. Mixing devices raises.
Every launch, copy and wait is counted with its file and line. Memory that was not written holds garbage.
With `late` what was launched runs only when it is waited for: a staging buffer written again too early and a
result read too early show. Without, it runs at once: a result buffer that two steps share shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch.utils import backend_registration

from kernels.machine import KernelMachine
from tests.support.stand_in_graphs import Graph
from tests.support.stand_in_operators import each_tensor, fill, garbage_like, spoil, way_of, written_by
from tests.support.stand_in_streams import Event, Stream, active, current, where

SETUP = "_setup_privateuseone_for_python_backend"
HAS_STAND_IN = hasattr(backend_registration, SETUP)
needs_stand_in = pytest.mark.skipif(not HAS_STAND_IN, reason=f"no stand-in device: torch lacks {SETUP}")
DEVICE = torch.device("privateuseone", 0)
"""Called "standin:0" once a `StandIn` was entered."""
CARD = KernelMachine("cuda", (9, 0), "the stand-in")
"""What it passes for where an attention kernel is chosen; the operators' twins compute."""
Named = dict[str, Any]
aten = torch.ops.aten


class StandInTensor(torch.Tensor):
    """A tensor on the stand-in; `memory` is where its numbers are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> Any:
        like = {"dtype": memory.dtype, "strides": memory.stride(), "storage_offset": memory.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, memory.size(), device=DEVICE, **like)

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

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
        self.late, self.launch_ms = late, launch_ms
        self.host_ms = 0.0
        """The host's virtual time; a test may add what the host takes."""
        self.current_stream = Stream()
        self.graph: Graph | None = None
        """Where launches go while it is captured."""
        self._failures: list[Exception | None] = []
        self._loses, self._lost = False, None
        self._unread: list[torch.Tensor] = []
        """Host memory that copies to the device have yet to read."""
        self.reset()

    def reset(self) -> None:
        """Begins to count anew: launches and waits by "file:line operator", the others by "file:line"."""
        self.launches, self.waits, self.event_waits = Counter[str](), Counter[str](), Counter[str]()
        self.copies_to_device, self.bytes_to_device = Counter[str](), Counter[str]()
        self.copies_to_host, self.bytes_to_host = Counter[str](), Counter[str]()
        self.views, self.allocations = 0, Counter[str]()

    def __enter__(self) -> StandIn:
        _backend()
        active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None and self._lost is None:
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
        self._failures, self._loses = [None] * after + [error], lost

    def check(self) -> StandIn:
        """Raises what a lost device raises."""
        if self._lost is not None:
            raise self._lost
        return self

    def run(self, func: Any, args: Any, kwargs: Named) -> Any:
        way, device = way_of(func), kwargs.get("device") or DEVICE
        if device.type != DEVICE.type and way in ("launch", "allocate"):
            return func(*self._memory_of(func, args), **kwargs)  # a tensor elsewhere, like one here
        return getattr(self, way)(func, args, kwargs)

    def launch(self, func: Any, args: Any, kwargs: Named) -> Any:
        values = self._memory_of(func, args)
        named = dict(zip(kwargs, self._memory_of(func, kwargs.values()), strict=True))
        work, queue = partial(func, *values, **named), self.graph or self.current_stream
        if self.graph is None:
            self.launches[f"{where()} {func._opname}"] += 1
        error = self._failures.pop(0) if self._failures else None
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        if error is not None:
            self.current_stream.put(partial(self._fail, error))
        written = written_by(func)
        if written is None and (self.late or self.graph):
            results = garbage_like(func, values, named)
            queue.put(lambda: fill(results, work()), self.launch_ms)
            return self._allocated(results)
        computed = queue.put(work, self.launch_ms)
        if written is None:
            return self._allocated(computed)
        found = [args[place] if place < len(args) else kwargs[name] for place, name in written]
        return found[0] if len(found) == 1 else found or None

    def view(self, func: Any, args: Any, kwargs: Named) -> Any:
        self.views += 1
        part = func(*self._memory_of(func, args), **kwargs)
        with torch.inference_mode(args[0].is_inference()):  # a view is of its base's kind
            return each_tensor(part, StandInTensor)

    def allocate(self, func: Any, args: Any, kwargs: Named) -> Any:
        return self._allocated(spoil(func(*self._memory_of(func, args), **kwargs | {"device": "cpu"})))

    def _allocated(self, results: Any) -> Any:
        """Tensors of new memory, which is the graph's while one is captured."""
        if self.graph is not None:
            self.graph.own(results)
        else:
            self.allocations[where()] += 1
        return each_tensor(results, StandInTensor)

    def wait(self, func: Any, args: Any, kwargs: Named) -> Any:
        """What the host has to know before it goes on: a number, or how large a result is."""
        if kwargs.get("output_size") is not None:
            return self.launch(func, args, kwargs)
        self._wait_here(func._opname)
        return each_tensor(func(*self._memory_of(func, args), **kwargs), StandInTensor)

    def copy(self, func: Any, args: Any, kwargs: Named) -> Any:
        target, source, in_background = (*args, kwargs.get("non_blocking", False))[:3]
        place = "device" if isinstance(target, StandInTensor) else "host"
        if place == "device" and isinstance(source, StandInTensor):
            return self.launch(func, args, kwargs)
        if self.graph is not None:
            raise RuntimeError(f"{where()} copy to the {place}: not while a graph is captured")
        getattr(self, f"copies_to_{place}")[where()] += 1
        getattr(self, f"bytes_to_{place}")[where()] += source.numel() * source.element_size()
        if place == "device":
            self._unread.append(source)
            self.current_stream.put(partial(self._read, target.memory, source))
        else:
            # Not where an earlier copy has yet to read: in the order of a stream it reads what was there.
            if not any(_overlap(target, each) for each in self._unread):
                spoil(target)
            self.current_stream.put(partial(target.copy_, source.memory))
        if not in_background:
            self._wait_here(f"copy to the {place}")
        return target

    def _read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._unread = [each for each in self._unread if each is not source]
        target.copy_(source)

    def convert(self, func: Any, args: Any, kwargs: Named) -> Any:
        """To another dtype, or to the host."""
        if (kwargs.get("device") or DEVICE).type == DEVICE.type:
            return self.launch(func, args, kwargs)
        target = torch.empty_like(args[0].memory, dtype=kwargs.get("dtype"))
        return self.copy(func, (target, args[0]), kwargs)

    def index(self, func: Any, args: Any, kwargs: Named) -> Any:
        """An index in host memory is copied; how many places a mask has, the host has to know."""
        places = [each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in args[1]]
        masked = any(place is not None and place.dtype == torch.bool for place in places)
        fills = len(places) == 1 and len(args) > 2 and args[2].numel() == 1
        args = (args[0], places, *args[2:])
        return self.wait(func, args, kwargs) if masked and not fills else self.launch(func, args, kwargs)

    def histogram(self, func: Any, args: Any, kwargs: Named) -> Any:
        return self.launch(func, (args[0].float(), *args[1:]), kwargs)  # a CPU has none of whole numbers

    def keep(self, func: Any, args: Any, kwargs: Named) -> Any:
        return args[0]

    def decompose(self, func: Any, args: Any, kwargs: Named) -> Any:
        return func.decompose(*args, **kwargs)

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

    def _wait_here(self, what: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"{where()} {what}: not while a graph is captured")
        self.waits[f"{where()} {what}"] += 1
        self.current_stream.finish()

    def _fail(self, error: Exception) -> None:
        self._lost = error if self._loses else None
        raise error


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, second = sorted((one, other), key=torch.Tensor.data_ptr)
    return second.data_ptr() < first.data_ptr() + first.nbytes


@cache
def _backend() -> Any:
    """Sets it up for the process; not as an accelerator, which torch would use in other tests."""
    module, dummy = backend_registration._DummyBackendModule(), backend_registration._DummyPrivateUse1Hook
    module.is_available, module.device_count = lambda: False, lambda: 0
    hook = type("HiddenHook", (dummy,), {"is_available": lambda hook: False})
    getattr(backend_registration, SETUP)("standin", module, hook())
    library = torch.library.Library("aten", "IMPL")

    def run(func: Any, *args: Any, **kwargs: Any) -> Any:
        return current().run(func, args, kwargs)

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        return run(aten.copy_.default, target, source, non_blocking)

    library.impl("_copy_from", copy_from, "PrivateUse1")
    for name in ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"):
        packet, _, overload = name.partition(".")
        func = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, partial(run, func), "PrivateUse1")
    return library


class StandInQueues:
    """The queues of the stand-in in use, for a `TorchRunner`."""

    event = Event

    def __init__(self) -> None:
        self._copies, self._graphs = Stream(), WeakSet[Graph]()

    def copying(self) -> AbstractContextManager[None]:
        return current().stream(self._copies)

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        run()
        graph = current().graph = Graph()
        try:
            run()
        finally:
            current().graph = None
        self._graphs.add(graph)

        def replay() -> None:
            current().launches[f"{where()} graph replay"] += 1
            current().current_stream.put(partial(self._run, graph), current().launch_ms)

        return replay

    def _run(self, graph: Graph) -> None:
        for each in self._graphs:  # they share their memory
            each.spoil()
        graph.run()

    def memory_bytes(self) -> int:
        """Of graphs alone."""
        return sum(graph.num_bytes for graph in self._graphs)

    def wait_for(self, event: Event) -> None:
        current().current_stream.wait_event(event)
