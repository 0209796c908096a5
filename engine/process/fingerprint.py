"""Fingerprint of a model directory and name of the machine, the keys of learned state; of its tokenizer.

A model's covers the config and the names, sizes, heads and tails of weight files: reading gigabytes would
take longer than loading them. The machine's name is its processor and cores, and its card where that
computes.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

HEAD_BYTES = 1 << 20
"""Of each weight file: a safetensors header names every tensor, its shape and place."""


def model_fingerprint(model_dir: Path) -> str:
    """32 hexadecimal digits, of config, tensor names and shapes and first weights. Raises OSError."""
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in sorted(model_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEAD_BYTES))
            file.seek(max(0, size - HEAD_BYTES))
            digest.update(file.read(HEAD_BYTES))
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(model_dir: Path) -> str:
    """32 hexadecimal digits, of `tokenizer.json`; empty where there is none."""
    path = model_dir / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.is_file() else ""


def machine_name(card: str = "") -> str:
    """Processor and number of cores, as in "Intel(R) Xeon(R) Gold 6448Y, 2 cores, x86_64", after the card's
    name: a step takes the time of both."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    host = f"{processor}, {os.cpu_count() or 1} cores, {platform.machine()}"
    return f"{card}; {host}" if card else host
