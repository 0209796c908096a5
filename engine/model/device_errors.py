"""torch's errors of a device, as those of `engine.core.model_runner`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.core.model_runner import DeviceLost, OutOfDeviceMemory


@contextmanager
def device_errors() -> Iterator[None]:
    """Raises `OutOfDeviceMemory` or `DeviceLost` where torch's error means that; others pass as they are."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(_first_line(error)) from error
    except RuntimeError as error:
        if not _answers():
            raise DeviceLost(_first_line(error)) from error
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


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
