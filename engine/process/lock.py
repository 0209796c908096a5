"""`EngineLock`: lock file of an engine in its data directory, held by `flock` until the process ends.

It names its holder, so that a restarted gateway finds the living engine; a stale file has no lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import msgspec

#: How long a starting engine retries: a prober holds the lock for microseconds.
TAKE_S = 0.5
TRY_EVERY_S = 0.02


class LockHeld(Exception):
    """Another engine holds the lock."""


class LockContent(msgspec.Struct, frozen=True):
    """Content of a lock file, JSON."""

    pid: int
    address: str
    engine_id: str
    protocol_version: int
    arguments: list[str] = []
    """The engine's command line options, to compare with those wanted."""
    pid_namespace: str = ""
    """Namespace in which `pid` is valid: containers can share a directory and not their processes."""


def pid_namespace() -> str:
    """Name of the PID namespace; empty where the system has only one."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def lock_path(data_dir: Path, engine_id: str) -> Path:
    return data_dir / f"{engine_id}.lock"


class EngineLock:
    """The lock, held from construction until `release` or the end of the process."""

    def __init__(self, path: Path, content: LockContent) -> None:
        """Raises `LockHeld` when another engine lives, `OSError` when the file cannot be written."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + TAKE_S
        while not _try_lock(self._descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline_s:
                os.close(self._descriptor)
                holder = _read(path)
                who = f"pid {holder.pid} at {holder.address}" if holder else "a process that did not say who"
                raise LockHeld(f"another engine ({who}) holds {path}: stop it, or use another data directory")
            time.sleep(TRY_EVERY_S)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(content), 0)

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def find_holder(path: Path) -> LockContent | None:
    """The living engine that holds the lock; None when it is not held or has no content yet."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if _try_lock(descriptor, fcntl.LOCK_SH):
            return None
        return _read(path)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> LockContent | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LockContent)
    except (OSError, msgspec.DecodeError):
        return None
