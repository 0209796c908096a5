"""The GPU's benchmark runs to its end without a GPU, claims nothing then, and says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import reference
from kernels.gpu.operators import SCHEMAS
from kernels.machine import KernelMachine
from ops.bench.gpu import steps
from ops.bench.gpu.run import SECTIONS, run
from ops.bench.gpu.section import NOT_MEASURED, Section
from tests.support.commands import run_command
from tests.support.stand_in_device import DEVICE, StandIn, StandInQueues, needs_stand_in


def leaves(value: Any) -> list[Any]:
    return [leaf for part in value.values() for leaf in leaves(part)] if isinstance(value, dict) else [value]


def test_a_rehearsal_runs_every_section_and_marks_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "ops.bench.gpu", "--rehearse", "--out", str(out)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # threads would wait for each other beside other tests
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    sections = json.loads(out.read_text())["sections"]
    assert set(sections) == set(SECTIONS)
    assert sum(most_s for most_s, _ in SECTIONS.values()) <= 480
    for figures in sections.values():
        assert all(NOT_MEASURED in leaf for leaf in leaves(figures)), figures
    for name in ("kernels", "roofline"):
        assert set(SCHEMAS) <= {figure.partition(",")[0] for figure in sections[name]}
    assert {sections["kernels"]["compiled"], sections["decode"]["graphs"]} == {
        f"needs a card: {NOT_MEASURED}"
    }
    assert {"1B, ratio", "8B, ratio"} <= set(sections["mixed"])


def test_a_section_whose_time_is_up_stops_and_the_next_one_runs(tmp_path: Path) -> None:
    lines: list[str] = []
    report = run(["kernels", "roofline"], tmp_path / "out", True, lines.append, most_s=0.0)
    assert (list(report["sections"]), report["ok"]) == (["kernels", "roofline"], None)
    for name, figures in report["sections"].items():
        assert "after 0 s, its time" in figures.pop("stopped")
        assert len(figures) == 1, "the one after which time was up"
        assert any(line.startswith(f"{name}: after 0 s, its time") for line in lines)


def test_a_wrong_kernel_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = reference.silu_multiply
    calls: list[Any] = []

    def wrong(gate_up: torch.Tensor, out: torch.Tensor) -> None:
        sound(gate_up, out)
        calls.append(out.mul_(1.0 + len(calls) % 2))

    monkeypatch.setattr(reference, "silu_multiply", wrong)
    report = run(["kernels"], tmp_path / "out", True, lambda line: None)
    assert report["ok"] is False
    assert [name.partition(",")[0] for name in report["sections"]["kernels"]["wrong"]] == ["silu_multiply"]


def test_without_a_card_it_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run_command("bench", "gpu", "--section", "decode")
    assert done.exit_code == 1
    assert "no CUDA device: --rehearse" in done.output


@needs_stand_in
def test_what_is_ours_runs_captured_on_a_device() -> None:
    torch.set_num_threads(1)
    with StandIn(), torch.no_grad():
        loading = {"machine": KernelMachine("cuda", (9, 0))}
        section = Section("split", inf, DEVICE, lambda line: None, {}, loading, StandInQueues())
        steps.split(section)
    for shape in steps.SHAPES:
        runner = section.kept[shape].runner
        assert (runner.graph_sizes, runner.mixed_sizes) == ((1, 2, 3), (64,)), section.figures[shape]
        assert f"{shape}, mixed workload" in section.figures
