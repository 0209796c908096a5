"""What of a machine decides which attention kernels can run there, and what a model's layers need of one."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.gpu import launching

DRIVER = Path("/proc/driver/nvidia/version")
"""Is there where a driver of NVIDIA's is loaded, whether torch can use it or not."""


@dataclass(frozen=True, slots=True)
class KernelMachine:
    kind: str
    """As torch calls it: "cpu", "cuda"."""
    capability: tuple[int, int] | None = None
    card: str = ""
    """As in "NVIDIA H200"."""
    triton: str | None = None
    """Why Triton kernels cannot be built or run here; None: they can."""
    flash_attn: str | None = None
    """Why the package cannot be used; None: it can."""

    def __str__(self) -> str:
        version = "".join(map(str, self.capability or ()))
        return f"{self.card or 'this card'} (sm_{version})" if version else self.kind


@dataclass(frozen=True, slots=True)
class LayerNeeds:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Tokens that a query sees, itself included."""
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    dtype: torch.dtype
    block_tokens: int
    layers: tuple[LayerNeeds, ...] = ()
    """Each kind of layer once; empty: not known yet."""


def machine_of(device: torch.device) -> KernelMachine:
    """Reads the machine of `device`; imports flash-attn where there is a card."""
    if device.type != "cuda":
        no_card = f"it runs on a CUDA card, and {why_no_card()}"
        return KernelMachine(device.type, triton=no_card, flash_attn=no_card)
    found, flash_attn = torch.cuda.get_device_properties(device), None
    try:
        importlib.import_module("flash_attn")
    except Exception as error:
        flash_attn = f"it cannot be imported (pip install flash-attn): {first_line(error)}"
    return KernelMachine("cuda", (found.major, found.minor), found.name, launching.missing(), flash_attn)


def why_no_card() -> str:
    """Why torch computes on no CUDA card, in one line."""
    if torch.cuda.is_available():
        return "this engine's device is not one"
    if not DRIVER.exists():
        return "there is none with a driver here"
    try:
        torch.cuda.init()
    except Exception as error:
        return f"torch cannot use the one here: {first_line(error)} (a newer driver, or torch's CUDA build?)"
    return "torch sees none, though a driver is loaded (CUDA_VISIBLE_DEVICES?)"


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
