"""The device that a model computes on: which one and in which number format, its queues and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from engine.core.model_runner import DeviceLost, OutOfDeviceMemory
from kernels.machine import first_line, why_no_card

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
HALF = ("bfloat16", "float16")


def device_of(name: str | None) -> torch.device:
    """The device of this name; None: CUDA where there is one. Raises ValueError for one that is not there."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if cards else "cpu"))
    except RuntimeError:
        raise ValueError(f"device {name!r} is not known; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= cards:
        there = f"CUDA devices 0 to {cards - 1}" if cards else f"no CUDA device ({why_no_card()}); use cpu"
        raise ValueError(f"device {name!r} is asked for, but torch sees {there}")
    return device


def dtype_of(name: str | None, device: torch.device, own: str) -> torch.dtype:
    """The number format of this name; None: float32 on a CPU, else the model's own where it is a half
    precision, or bfloat16. `own`: what its config says. Raises ValueError."""
    if name is None:
        name = "float32" if device.type == "cpu" else own if own in HALF else "bfloat16"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not served; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def prepare(device: torch.device) -> None:
    """Sets what torch should do on `device`, before anything computes there."""
    if device.type != "cuda":
        return
    # cuDNN's attention builds a plan for each new shape, and in serving every step has one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.index is not None:
        torch.cuda.set_device(device)


def card_name(device: torch.device) -> str:
    """As in "NVIDIA H200"; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def why_no_room(weight_bytes: int, free_bytes: int, device: torch.device) -> str | None:
    """Why weights do not fit on a card; None: they do."""
    if weight_bytes <= free_bytes:
        return None
    return (
        f"the weights take {weight_bytes / 2**30:.2f} GiB, but on {device} {free_bytes / 2**30:.2f} GiB are"
        " free: free memory there, or serve a smaller model"
    )


class DeviceEvent(Protocol):
    """A point in a queue, as `torch.cuda.Event`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


class DeviceQueues(Protocol):
    """A device that computes while the host goes on: one queue for steps, another for copies."""

    def event(self) -> DeviceEvent:
        """A new event, which keeps time."""
        ...

    def copying(self) -> AbstractContextManager[Any]:
        """What is launched inside goes into the queue of copies, which waits for no step by itself."""
        ...

    def wait_for(self, event: DeviceEvent) -> None:
        """The queue in use goes on when the event has passed. The host does not wait."""
        ...

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """Runs it once, then captures what it launches; the result launches that again, as one graph. All
        graphs share their memory: two never run at once. Raises RuntimeError."""
        ...

    def memory_bytes(self) -> int:
        """Of the device, held by this process."""
        ...


class CudaQueues:
    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, None
        self._copies = torch.cuda.Stream(device)
        self.event = partial(torch.cuda.Event, enable_timing=True)

    def copying(self) -> AbstractContextManager[Any]:
        inside: AbstractContextManager[Any] = torch.cuda.stream(self._copies)
        return inside

    def wait_for(self, event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        run()  # what is made at a first run, as a plan of a product, may not be made while capturing
        graph = torch.cuda.CUDAGraph()
        # Where capturing fails, torch leaves its own stream in use, and its error hides the first one.
        with torch.cuda.stream(torch.cuda.current_stream()):
            try:
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    run()
            except RuntimeError as error:
                raise error.__context__ or error from None
        replay: Callable[[], object] = graph.replay
        return replay

    def memory_bytes(self) -> int:
        torch.cuda.empty_cache()  # steps that are not captured leave gaps, which are no part of the graphs
        return int(torch.cuda.memory_reserved(self._device))


def mark(queues: DeviceQueues) -> DeviceEvent:
    """An event after what was launched so far into the queue in use."""
    event = queues.event()
    event.record()
    return event


def queues_of(device: torch.device) -> DeviceQueues | None:
    """The device's own; None: what is launched there is done when the call returns."""
    return CudaQueues(device) if device.type == "cuda" else None


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises `OutOfDeviceMemory` or `DeviceLost` where torch's error means that; others pass as they are."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(first_line(error)) from error
    except RuntimeError as error:
        if not _answers():
            raise DeviceLost(first_line(error)) from error
        raise


def _answers() -> bool:
    """Whether the current device can still be used: after an illegal access, a failed assertion or a hardware
    fault CUDA returns the same error from every call."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
