"""torch's errors of a device: what lowers a step, what ends the process, and what fails one step."""

from __future__ import annotations

import pytest
import torch

from engine.core.model_runner import DeviceLost, OutOfDeviceMemory
from engine.model.device import device_errors

ILLEGAL = "CUDA error: an illegal memory access\nSearch for `cudaErrorIllegalAddress'"


def cuda(monkeypatch: pytest.MonkeyPatch, error: RuntimeError | None) -> None:
    """CUDA as torch shows it, healthy or after an error that every later call returns."""

    def synchronize() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_no_memory_is_named_as_such() -> None:
    with pytest.raises(OutOfDeviceMemory, match=r"^CUDA out of memory\. Tried 2 GiB\.$"), device_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore lines.")


def test_a_device_that_answers_no_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library above CUDA reports the error in words of its own."""
    cuda(monkeypatch, torch.AcceleratorError(ILLEGAL))
    for error in (torch.AcceleratorError, RuntimeError):
        with pytest.raises(DeviceLost, match=r"^CUDA error: an illegal memory access$"), device_errors():
            raise error(ILLEGAL)


@pytest.mark.parametrize("has_cuda", [True, False])
def test_other_errors_pass_as_they_are(monkeypatch: pytest.MonkeyPatch, has_cuda: bool) -> None:
    if has_cuda:
        cuda(monkeypatch, None)
    for error in (RuntimeError("shapes do not match"), ValueError("a slice reaches past")):
        with pytest.raises(type(error)) as caught, device_errors():
            raise error
        assert caught.value is error
