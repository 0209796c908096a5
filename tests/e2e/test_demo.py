"""The demo in a short form: the whole way of its requests, and a report that holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from ops.demo.cast import CAST
from tests.support.chromium import CHROMIUM, problems_of_files
from tests.support.report_page import shown_report
from tests.support.server_process import ROOT


def run_once(data_dir: Path, report_file: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    return subprocess.run(
        [
            sys.executable, "-m", "ops.cli.main", "demo", "--once", "--json", str(report_file),
            "--html", str(report_file.with_name("report-demo.html")),
            "--seconds", str(seconds), "--max-sequences", "3", "--data-dir", str(data_dir),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.long
def test_the_demo_beside_other_load_is_in_order_and_judges_no_times(tmp_path: Path) -> None:
    # Each in a session of its own: Linux shares the cores between sessions (autogroup).
    busy_loop = [sys.executable, "-c", "while True: pass"]
    cores = os.cpu_count() or 1
    hogs = [subprocess.Popen(busy_loop, start_new_session=True) for _ in range(2 * cores)]
    try:
        done = run_once(tmp_path / "data", tmp_path / "out.json", 20)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["audit"]["inversions"], report["ledger"]["exact"]) == (0, True)
    assert report["machine"]["too_busy_to_judge_times"]
    assert "too busy to judge times" in done.stdout


def test_the_demo_runs_once_and_reports_in_json(tmp_path: Path) -> None:
    data_dir, report_file = tmp_path / "data", tmp_path / "out.json"
    done = run_once(data_dir, report_file, 4)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_file.read_text())
    assert report["ok"]
    assert report["failed"] == []
    assert report["ledger"]["exact"]
    assert report["ledger"]["open_requests"] == 0
    assert report["ledger"]["pages"]["differences"] == []
    assert report["ledger"]["pages"]["read"] > 3 * len(CAST)
    audit = report["audit"]
    assert (audit["inversions"], audit["unfair_dispatches"], audit["untrue_ranks"]) == (0, 0, 0)
    assert audit["compared"] > 0
    assert {row["tenant"] for row in report["tenants"]} == {tenant.name for tenant in CAST}
    requests = report["requests"]
    assert requests["sent"] == report["trace"]["requests"]
    assert requests["answered"] + requests["refused"] + requests["cut"] == requests["sent"]
    assert requests["longest_answer_tokens"] <= 320
    assert set(report["refusals"]) <= {"insufficient_quota", "rate_limit_exceeded"}
    assert report["estimates"]["cost_above_quoted_maximum"] == 0
    assert report["queue_wait_of_tenants_under_their_share"]["simulated_p99_s"].keys() == {"hybrid", "fcfs"}
    light, heavy = (report["turns"]["tokens"][name] for name in ("turns-light", "turns-heavy"))
    assert light + heavy == report["turns"]["steps"] >= 400, "one slot a step, of no other tenant"
    assert abs(heavy - 3 * light) <= 4
    forms = report["forms"]
    assert all(forms[name]["valid"] == forms[name]["asked"] > 20 for name in ("json", "cut", "calls"))
    assert all(2 * forms[name]["right"] > forms[name]["asked"] for name in ("json", "calls"))
    assert forms["cut"]["closed"] > 12
    page = shown_report(tmp_path / "report-demo.html")
    assert page.exact == report
    shares = [row["share_of_ideal"] for row in report["tenants"] if row["share_of_ideal"] is not None]
    assert [f"{each:.2f}" for each in shares] == page.drawn[1 : 2 * len(shares) : 2]
    if CHROMIUM is not None:
        assert problems_of_files([tmp_path / "report-demo.html"]) == []
    # Without a terminal: plain lines, the key and the curl line to try among them, and no control codes.
    assert "\x1b" not in done.stdout
    assert "curl http://127.0.0.1:" in done.stdout
    assert "fg_live_" in done.stdout
    assert "Ledger = counters: exact" in done.stdout
    assert not [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(data_dir) in (process.info["cmdline"] or [])
    ], "server and engine end with the demo"


def test_a_directory_that_was_used_before_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fairgate.db").write_text("")
    done = CliRunner().invoke(cli, ["demo", "--once", "--data-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "has a database already" in done.stderr
