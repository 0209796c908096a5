"""Numba: availability, compilation and threads of the CPU kernels, which are optional.

They share torch's OpenMP threads: Numba's OpenMP layer resolves to the library that torch has loaded. Kernels
are kept on disk in a folder named by a hash of the sources: Numba itself does not notice a changed helper."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

FAST_MATH: Final = frozenset({"reassoc", "nsz", "arcp", "contract"})
"""Fast-math flags. Not `nnan` and `ninf`: a masked score is minus infinity."""
KEPT_FOLDERS: Final = 3
"""Number of folders of compiled kernels kept on disk; older ones belong to old sources."""

try:
    import numba

    if sys.platform == "linux":
        # It is linked to the system's libgomp, which a slim image lacks; torch's own has another name.
        import numba.np.ufunc.omppool
except ImportError as error:
    numba = None
    MISSING: str | None = (
        f"Numba does not run ({error}): pip install 'fairgate[engine]', on Debian apt-get install libgomp1"
    )
else:
    MISSING = None


def compiled(*, parallel: bool = False, inline: bool = False) -> Callable[[Function], Function]:
    """Decorates a kernel: compiled at its first call, without the GIL, kept on disk if that is writable."""

    def decorate(function: Function) -> Function:
        options: dict[str, Any] = {"nogil": True, "fastmath": set(FAST_MATH), "parallel": parallel}
        if inline:
            return numba.njit(inline="always", **options)(function)  # type: ignore[no-any-return]
        try:
            return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
        except RuntimeError:
            return numba.njit(**options)(function)  # type: ignore[no-any-return]

    return decorate


def use_threads(count: int) -> int:
    """Sets and returns the number of threads for kernels of this thread: `count`, or all that Numba has."""
    allowed: int = max(1, min(count, numba.config.NUMBA_NUM_THREADS))
    if not _launched:
        # Numba's first start sets the OpenMP thread count that torch uses too: put it back.
        numba.set_num_threads(allowed)
        torch.set_num_threads(count)
        _launched.append(True)
    numba.set_num_threads(allowed)
    return allowed


_launched: list[bool] = []


def describe() -> str:
    if numba is None:
        return str(MISSING)
    return f"Numba {numba.__version__}, {torch.get_num_threads()} threads ({numba.config.THREADING_LAYER})"


def _cache_folder() -> Path | None:
    """Folder of compiled kernels; None: the environment names one, or there is no writable home."""
    if "NUMBA_CACHE_DIR" in os.environ:
        return None
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairgate" / "kernels"
    folder = root / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except (OSError, RuntimeError):
        return None
    _remove_old(root)
    return folder


def _remove_old(root: Path) -> None:
    folders = sorted(
        (path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    for folder in folders[:-KEPT_FOLDERS]:
        for file in sorted(folder.rglob("*"), reverse=True):
            try:
                file.rmdir() if file.is_dir() else file.unlink()
            except OSError:
                return
        folder.rmdir()


if numba is not None:
    if sys.platform == "linux":
        numba.config.THREADING_LAYER = "omp"
    _folder = _cache_folder()
    if _folder is not None:
        numba.config.CACHE_DIR = str(_folder)
