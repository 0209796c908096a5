"""The device that a model computes on: which one, in which number format, and what it must be before."""

from __future__ import annotations

import torch

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
        there = f"CUDA devices 0 to {cards - 1}" if cards else "no CUDA device; use cpu"
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
