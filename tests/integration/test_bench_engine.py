"""The engine benchmark runs real engines through its real protocol, with equal tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numba
import pytest

import kernels.cpu.jit  # noqa: F401  (says where compiled kernels are kept)
from ops.bench.engine.report import show
from ops.bench.engine.run import EngineBenchOptions, run

LENGTHS = ((9, 5), (33, 1), (4, 12), (70, 7))


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four requests; models are made where they vanish again, compiled kernels are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", numba.config.CACHE_DIR)
    path = tmp_path / "workload.json"
    requests = [
        {"prompt_tokens": prompt, "output_tokens": output, "arrival": number * 0.5}
        for number, (prompt, output) in enumerate(LENGTHS)
    ]
    path.write_text(json.dumps({"name": "four", "seed": 5, "requests": requests}), encoding="utf-8")
    return path


def options(workload: Path, **fields: Any) -> EngineBenchOptions:
    chosen: dict[str, Any] = {
        "model": "micro", "workload": workload, "peers": (), "repetitions": 1, "threads": 1,
        "max_sequences": 2, "roofline_s": 0.0, **fields,
    }  # fmt: skip
    return EngineBenchOptions(**chosen)


def test_ours_and_transformers_say_the_same(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    report = run(options(workload, peers=("transformers",), roofline_s=0.01), lines.append)
    assert len(lines) == 2, "one run each"
    for name in ("fairgate", "transformers"):
        (figures,) = report["engines"][name]["runs"]
        assert report["engines"][name]["about"]["name"] == name
        assert (figures["requests"], figures["output_tokens"]) == (4, sum(output for _, output in LENGTHS))
        assert 0 < figures["ttft_s"]["p50"] <= figures["e2e_s"]["p99"] <= figures["wall_s"]
        assert figures["peak_bytes"] > 50e6
    agreed = report["agreement"]["transformers"]
    assert (agreed["identical_requests"], agreed["compared_tokens"]) == (4, 25)
    assert agreed["distinct_tokens"] > 9, "a model that says one token tests nothing"
    assert report["ratios"]["transformers"]["output_tokens_per_s"]["median"] > 0
    shares = report["roofline"]["share_of_ideal"]
    assert set(shares) == {"fairgate", "transformers"}
    assert all(share > 0 for share in shares.values())
    json.dumps(report)
    show(report)
    shown = capsys.readouterr().out
    assert "4 of 4 requests identical" in shown
    assert re.search("a grammar's mask: [1-9][0-9]* us of processor time a row", shown)


def test_poisson_arrivals_are_at_a_share_of_the_measured_capacity(workload: Path) -> None:
    report = run(options(workload, arrivals="poisson", poisson_requests=6, load_share=0.5, detokenize=True))
    capacity = report["capacity"]
    assert capacity["slowest"] == "fairgate"
    assert report["rate_per_s"] == pytest.approx(0.5 * capacity["requests_per_s"]["fairgate"])
    assert report["workload"]["requests"] == 6
    (figures,) = report["engines"]["fairgate"]["runs"]
    assert figures["requests"] == 6
    assert report["engines"]["fairgate"]["about"]["text"] is True
    assert "roofline" not in report, "the ideal is for requests that arrive at once"
