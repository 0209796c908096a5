"""The fairness benchmark's tables, and what makes a run invalid."""

from __future__ import annotations

import contextlib
from typing import Any

import click
import pytest

from ops.bench.common.load_client import Observed
from ops.bench.fairness import live
from ops.bench.fairness.live import QueueSamples, judged
from ops.cli.bench.options import verdict
from ops.reporting import all_ok


def pool_report(ratio: float) -> dict[str, Any]:
    row = {"requests": 2000, "unsent": 7, "ttft_p50_s": 0.05, "account_ttft_p99_s": 0.1}
    return {
        "cores": {"engine": 1, "others": 1},
        "requests_per_s": 50.0,
        "cost_per_s": 2500,
        "flood": {
            "rows": {
                "equal half": row | {"other_share": 0.5, "ttft_p99_s": 0.2},
                "flood": row | {"other_share": 5.0, "ttft_p99_s": 0.2 * ratio},
            },
            "ratio": ratio,
            "ok": ratio <= live.MAX_RATIO,
        },
        "tiers": {
            "interactive_requests": 300, "interactive_ttft_p50_s": 0.05, "interactive_ttft_p99_s": 0.1,
            "batch_ttft_p50_s": 2.0, "batch_share_of_service": 0.7, "places_taken": 250, "ok": True,
        },
        "reservations": {
            "reserved_cost_per_s": 750,
            "served_of_reserved": 0.99,
            "without_reservation": 0.01,
            "ok": True,
        },
    }  # fmt: skip


@pytest.mark.parametrize(("ratio", "verdict"), [(1.2, ": ok"), (1.6, ": NOT ok")])
def test_a_flood_is_judged_by_its_ratio(
    capsys: pytest.CaptureFixture[str], ratio: float, verdict: str
) -> None:
    live.show(pool_report(ratio))
    said = capsys.readouterr().out
    (line,) = [each for each in said.splitlines() if each.startswith("flood over equal half")]
    assert line == f"flood over equal half: {ratio:.3f}, at most 1.5{verdict}"
    assert "250 places taken" in said
    assert "99.0%" in said


def test_parts_that_were_not_measured_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    report = pool_report(1.0)
    del report["tiers"], report["reservations"]
    live.show(report)
    said = capsys.readouterr().out
    assert "tiers" not in said
    assert "reservations" not in said


def test_weights_are_shown_with_jains_index_and_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    one = {
        "light_cost_tokens": 33_000,
        "heavy_cost_tokens": 99_000,
        "ratio": 3.0,
        "deviation": 0.0,
        "jain_index": 0.999999,
        "gap_over_bound": 0.031,
        "seconds": 40.0,
        "least_queued": {"light": 300, "heavy": 20},
        "client_cpu_shares": {"light": 0.31, "heavy": 0.05},
        "queue_samples": 160,
        "empty_samples": {"light": 0, "heavy": 0},
        "invalid": None,
        "ok": True,
    }
    live.show({"weights": judged([one])})
    said = capsys.readouterr().out
    assert "Jain index 0.999999" in said
    assert "0.031 of the bound 2U: ok" in said
    assert any(
        line.split() == ["weights", "1", "light", "31.0%", "0", "of", "160"] for line in said.splitlines()
    )


def status(**queued: int) -> dict[str, Any]:
    return {"tenants": [{"name": name, "queued": {"standard": count}} for name, count in queued.items()]}


def test_a_run_with_an_empty_queue_is_invalid_and_not_judged() -> None:
    samples = QueueSamples("light", "heavy")
    for heavy in (3, 0, 2, 1):
        samples.add(status(light=200, heavy=heavy, other=0))
    samples.used("heavy", Observed(cpu_share=0.97))
    samples.used("heavy", Observed(cpu_share=0.5))
    for would_be_ok in (True, False):
        found = samples.judge(would_be_ok)
        assert found["ok"] is None
        assert found["empty_samples"] == {"light": 0, "heavy": 1}
        assert found["client_cpu_shares"] == {"heavy": 0.97}
        assert found["invalid"] == (
            "tenant heavy's queue was empty in 25 % of the samples; its client used 97 % of a core"
        )


@pytest.mark.parametrize("ok", [True, False])
def test_a_run_whose_queues_always_held_requests_is_judged(ok: bool) -> None:
    samples = QueueSamples("light")
    samples.add(status(light=1))
    found = samples.judge(ok)
    assert (found["invalid"], found["ok"]) == (None, ok)


def test_a_run_without_a_sample_is_invalid() -> None:
    assert QueueSamples("light").judge(True)["invalid"] == "no sample of the queues was taken"


def one_run(ratio: float, *, ok: bool | None, invalid: str | None = None) -> dict[str, Any]:
    return {
        "ratio": ratio,
        "deviation": abs(ratio / 3 - 1),
        "jain_index": 1.0,
        "gap_over_bound": 0.1,
        "invalid": invalid,
        "ok": ok,
    }


def test_invalid_runs_do_not_count_beside_valid_ones() -> None:
    found = judged([one_run(0.2, ok=None, invalid="a queue was empty"), one_run(3.0, ok=True)])
    assert (found["least_ratio"], found["worst_deviation"]) == (3.0, 0.0)
    assert (found["ok"], found["invalid"]) == (None, "run 1: a queue was empty")
    assert judged([one_run(0.2, ok=None, invalid="why")])["median_ratio"] == 0.2
    assert judged([one_run(0.2, ok=None, invalid="why"), one_run(2.0, ok=False)])["ok"] is False


@pytest.mark.parametrize(("oks", "code"), [([True, True], 0), ([True, None], 3), ([None, False], 1)])
def test_an_invalid_run_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, oks: list[bool | None], code: int
) -> None:
    monkeypatch.setattr("ops.cli.bench.options.answer", lambda report, show, charts: show())
    report = {"ok": all_ok({"ok": ok} for ok in oks)}
    with pytest.raises(click.exceptions.Exit) if code else contextlib.nullcontext() as ended:
        verdict(report, lambda: None)
    assert code == (ended.value.exit_code if ended else 0)
