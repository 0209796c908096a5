"""torch's errors of a device: what lowers a step, what ends the process, and what fails one step."""

from __future__ import annotations

import pytest
import torch

from engine.core.model_runner import DeviceLost, OutOfDeviceMemory
from engine.model.device_errors import device_errors

ILLEGAL = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'"


def cuda(monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> None:
    """CUDA as torch shows it, healthy or after an error that every later call returns."""

    def synchronize() -> None:
        if not answers:
            raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_no_memory_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(monkeypatch, answers=True)
    with pytest.raises(OutOfDeviceMemory, match=r"^CUDA out of memory\. Tried 2 GiB\.$"), device_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore lines.")


@pytest.mark.parametrize("error", [torch.AcceleratorError, RuntimeError])
def test_a_device_that_answers_no_more_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError]
) -> None:
    """Also where a library above CUDA reports the error in words of its own."""
    cuda(monkeypatch, answers=False)
    with (
        pytest.raises(DeviceLost, match=r"^CUDA error: an illegal memory access was encountered$"),
        device_errors(),
    ):
        raise error(ILLEGAL)


@pytest.mark.parametrize("has_cuda", [True, False])
def test_other_errors_pass_as_they_are(monkeypatch: pytest.MonkeyPatch, has_cuda: bool) -> None:
    if has_cuda:
        cuda(monkeypatch, answers=True)
    for error in (RuntimeError("shapes do not match"), ValueError("a slice reaches past"), KeyError("x")):
        with pytest.raises(type(error)) as caught, device_errors():
            raise error
        assert caught.value is error
