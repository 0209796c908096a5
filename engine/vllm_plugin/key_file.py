"""Reads the key that a gateway and the vLLM plug-in share, from a file that only its owner can read."""

from __future__ import annotations

import os
import stat

from engine.vllm_plugin.signature import MIN_KEY_BYTES

MAX_KEY_BYTES = 4096


def read_key(path: str) -> bytes:
    """Returns the file's bytes without surrounding white space. Raises ValueError, which names the file and
    the way out and nothing of the key: it is missing, readable by others, or shorter than 32 bytes."""
    way_out = "make one with: (umask 077; openssl rand -hex 32 > KEY_FILE)"
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ValueError(f"key file {path}: {error.strerror}; {way_out}") from None
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"key file {path} is not a file; {way_out}")
    if info.st_mode & 0o077:
        raise ValueError(
            f"key file {path} can be read by others (mode {stat.S_IMODE(info.st_mode):04o}): chmod 600 {path}"
        )
    if len(data) > MAX_KEY_BYTES:
        raise ValueError(f"key file {path} holds more than {MAX_KEY_BYTES} bytes; {way_out}")
    key = data.strip()
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"key file {path} holds {len(key)} bytes, at least {MIN_KEY_BYTES} are needed; {way_out}"
        )
    return key
