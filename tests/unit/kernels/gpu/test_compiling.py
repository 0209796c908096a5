"""Kernels are compiled before they are launched, and kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kernels.gpu.compiling import KernelRefused, compile_all, use_cache
from kernels.gpu.launching import collecting, launch
from tests.unit.kernels.gpu.ahead_of_time import no_card

triton = pytest.importorskip("triton", reason="triton is not installed: it is for Linux only")
from triton import language as tl  # noqa: E402


def counted(out, length: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, length), tl.arange(0, length))


def compiled(*lengths: int) -> int:
    kernel = triton.JITFunction(counted)  # compiled, although the suite interprets
    with collecting() as variants:
        for length in (*lengths, *lengths):
            launch(kernel, (1,), torch.empty(64, dtype=torch.int32), length=length)
    return compile_all(variants).kernels


def test_variants_are_compiled_once_and_the_way_out_is_said_where_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", no_card(90))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    with pytest.raises(KernelRefused, match=r"kernel counted does not compile here: .*power of 2.*sdpa"):
        compiled(48, 24, 16, 32)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(kept) == 2, "the others are ready"
    assert compiled(16, 32) == 2
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")} == kept


def test_the_cache_is_private_where_an_operator_has_no_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelRefused, match=f"cannot be kept in {tmp_path}/file: File exists"):
        use_cache(tmp_path / "file")
    (tmp_path / "ours").mkdir(mode=0o755)
    use_cache(tmp_path / "ours")
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o700

    use_cache(tmp_path / "another")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "ours")
