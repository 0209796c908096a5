"""Answers and refusals of `fairgate simulate`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import run_command

FEW = ("--trace", "arena", "--limit", "40", "--gpu", "l40s", "--model", "1b")


simulate = partial(run_command, "simulate")


def test_a_trace_is_simulated_and_told_in_tables() -> None:
    result = simulate(*FEW)
    assert result.exit_code == 0, result.output
    assert "arena_slice.csv (first 40)" in result.output
    for word in ("1b on l40s", "fcfs", "hybrid", "TTFT p50", "gap/2U", "Virtual time"):
        assert word in result.output


def test_json_says_the_same() -> None:
    result = simulate(*FEW, "--policy", "vtc", "--replicas", "2", "--slo", "ttft=1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["replicas"] == 2
    assert report["slo"] == "ttft 1 s"
    assert report["policies"][0]["requests"] == 40
    assert len(report["policies"][0]["tenants"]) > 5


def test_the_same_seed_gives_the_same_report() -> None:
    asked = ("--generate", "tenants=3,rate=5,seconds=10,flooder=1", "--model", "1b", "--json")
    assert simulate(*asked).stdout == simulate(*asked).stdout
    assert simulate(*asked).stdout != simulate(*asked, "--seed", "1").stdout


def test_options_of_policies_are_those_of_the_policies() -> None:
    asked = (*FEW, "--policy", "static", "--json")
    one_by_one = json.loads(simulate(*asked, "--option", "batch-size=1", "--option", "window_s=0").stdout)
    together = json.loads(simulate(*asked, "--option", "batch_size=8").stdout)
    waits_s = [report["policies"][0]["e2e_s"]["mean"] for report in (one_by_one, together)]
    assert waits_s[0] != waits_s[1]


def test_the_table_of_sustained_rates() -> None:
    result = simulate(*FEW, "--sustained", "--policy", "static,fcfs", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["rows"][0]["rate_per_s"]) == {"static", "fcfs"}
    assert "Orca" in found["published"][0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "say one of --trace, --generate and --preset"),
        (("--trace", "azure", "--preset", "chat"), "say one of"),
        (("--trace", "azure", "--trace", "arena"), "several --trace go with --sustained"),
        (("--preset", "tea"), "no preset 'tea'; there are chat"),
        (("--trace", "azure", "--policy", "lottery"), "no policy 'lottery'; there are"),
        (("--trace", "azure", "--option", "batch_size"), "--option 'batch_size' is not NAME=VALUE"),
        (("--trace", "azure", "--option", "batch_size=4097"), "takes a whole number from 0 to 4096"),
        (("--trace", "azure", "--gpu", "tpu"), "no GPU 'tpu'"),
        (("--trace", "azure", "--gpu", "l40s", "--model", "70b"), "take more GPUs"),
        (("--trace", "azure", "--slo", "fast"), "is no target"),
        (("--trace", "azure", "--speed", "0"), "speed must be above 0"),
        (("--generate", "tenants=-3"), "tenants must be between"),
        (("--trace", "azure", "--html", "nowhere/at/all.html"), "no directory"),
        (("--trace", "azure", "--profile", "p.json", "--gpu", "h200"), "leave out --gpu"),
        (("--trace", "azure", "--profile", "none.json"), "cannot be read as JSON"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], why: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())


def test_a_bad_trace_is_a_failure_that_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n1,5,5\n0.5,5,5\n")
    result = simulate("--trace", str(path))
    assert result.exit_code == 1
    assert "line 3, column arrival_s: rows must be in order of arrival" in " ".join(result.output.split())
