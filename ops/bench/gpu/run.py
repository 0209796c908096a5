"""Runs the sections of the GPU's benchmark, and writes the report as each ends."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from ops.bench.common.errors import CannotBench
from ops.bench.common.report import Progress, machine
from ops.bench.gpu import kernels, steps
from ops.bench.gpu.section import NOT_MEASURED, Section, TimeIsUp

SECTIONS: dict[str, tuple[float, Callable[[Section], None]]] = {
    "kernels": (90.0, kernels.check),
    "roofline": (40.0, kernels.roofline),
    "decode": (105.0, steps.decode),
    "mixed": (200.0, steps.mixed),
    "split": (45.0, steps.split),
}
"""Seconds that each may take, eight minutes in all, and what it runs."""


def run(
    names: Sequence[str], out: Path, rehearse: bool, tell: Progress, most_s: float | None = None
) -> dict[str, Any]:
    """The report; its `ok`: False where something failed or is wrong, None where time was up. `most_s`: in
    place of the sections' own time. Raises `CannotBench`."""
    if not rehearse and not torch.cuda.is_available():
        raise CannotBench("torch sees no CUDA device: --rehearse runs all of it in small on the CPU")
    if not rehearse and find_spec("triton") is None:
        raise CannotBench("triton is missing: pip install 'fairgate[gpu]'")
    report: dict[str, Any] = {
        "card": NOT_MEASURED if rehearse else torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__, "transformers": transformers.__version__, "machine": machine(),
        "sections": {}, "ok": True,
    }  # fmt: skip
    device, kept = torch.device("cpu" if rehearse else "cuda"), dict[str, Any]()
    loading = {"attention": "torch-sdpa", "fast_paths": False} if rehearse else {}
    for name in [name for name in SECTIONS if name in names or not names]:
        limit_s, work = SECTIONS[name]
        limit_s = limit_s if most_s is None else most_s
        section = Section(name, time.perf_counter() + limit_s, device, tell, kept, loading)
        figures = report["sections"][name] = section.figures
        try:
            with torch.no_grad():
                work(section)
        except TimeIsUp:
            figures["stopped"] = f"after {limit_s:g} s, its time: what is missing was {NOT_MEASURED}"
            report["ok"] = report["ok"] and None
        except Exception as error:
            figures["error"], report["ok"] = traceback.format_exc()[-3000:], False
            tell(f"{name}: {type(error).__name__}: {error}. Again, alone: --section {name}; all of it: {out}")
        report["ok"] = report["ok"] if "wrong" not in figures else False
        tell(f"{name}: {figures.get('stopped', 'ended')}")
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report
