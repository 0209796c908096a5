"""`fairgate policy learn`: the same seed, the same table; and a file is replaced only by a better one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.flow.learned.actions import HYBRID
from gateway.flow.learned.macro_state import NUM_STATES
from gateway.flow.learned.table_file import LearnedTable
from tests.support.bursty_traffic import STEP_TIME, TWO_PLACES, bursty, write_trace
from tests.support.commands import run_command
from tests.support.learned_tables import learned_table

BUDGET = "3000"


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with traces, and the machine that serves them."""
    path = tmp_path_factory.mktemp("learn")
    profile = {name: getattr(STEP_TIME, name) for name in ("base_s", "per_token_s", "per_context_token_s")}
    sizes = {name: getattr(TWO_PLACES, name) for name in ("max_sequences", "max_batched_tokens", "kv_tokens")}
    (path / "two.json").write_text(json.dumps(profile | {"per_sequence_s": 0.0} | sizes))
    write_trace(path / "bursty.csv", bursty())
    write_trace(path / "calm.csv", bursty(1000.0, burst=0.5))
    write_trace(path / "short.csv", bursty(60.0))
    return path


def asked(where: Path, trace: str, *more: str) -> list[str]:
    return [
        *("policy", "learn", "--trace", str(where / trace), "--profile", str(where / "two.json"), "--json"),
        *("--budget", BUDGET, *more),
    ]


@pytest.fixture(scope="module")
def learned(where: Path) -> dict[str, Any]:
    """A table of bursts was written."""
    result = run_command(*asked(where, "bursty.csv", "--out", str(where / "table.json")))
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_a_table_that_wins_on_what_was_held_out_is_written(where: Path, learned: dict[str, Any]) -> None:
    table = LearnedTable.load(where / "table.json")
    assert learned["is_better"]
    assert learned["written"] == str(where / "table.json")
    assert table.judged is not None
    assert table.judged.hybrid - table.judged.learned > table.judged.spread
    assert (table.trace, table.machine, table.seed) == ("bursty.csv", "profile two.json", 0)
    assert table.simulated_requests == learned["simulated_requests"] <= int(BUDGET)
    assert not set(learned["pieces"]["searched_on"]) & set(learned["pieces"]["held_out"])
    assert sum(entry.share for entry in table.entries) == pytest.approx(1.0, abs=1e-4)
    assert any(entry.actions.admission > 0 for entry in table.entries)
    assert all(change["gain"] > change["spread"] for change in learned["changes"])
    assert "0.25 x mean of min(TTFT / 2 s, 4)" in learned["objective"]
    assert "without energy" in learned["objective"], "a profile has no figure of it"
    assert {"long_share", "ageing"} <= set(learned["left_as_hybrid"])


def test_the_same_seed_gives_the_same_bytes_in_another_process(where: Path, learned: dict[str, Any]) -> None:
    again = where / "again.json"
    subprocess.run(
        [sys.executable, "-m", "ops.cli.main", *asked(where, "bursty.csv", "--out", str(again))],
        env=os.environ | {"PYTHONHASHSEED": "4242"},
        check=True,
        capture_output=True,
    )
    assert again.read_bytes() == (where / "table.json").read_bytes()


def test_a_table_that_does_not_win_is_not_written_and_the_answer_says_so(where: Path) -> None:
    out = where / "calm.json"
    result = run_command(*asked(where, "calm.csv", "--out", str(out)))
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["is_better"], report["written"]) == (False, None)
    assert "does not win against hybrid on the held-out pieces" in report["notes"][-1]
    assert f"{out} stays as it is" in report["notes"][-1]
    assert not out.exists()


@pytest.mark.long
def test_the_table_that_is_there_stays_where_a_new_one_is_no_better(
    where: Path, learned: dict[str, Any]
) -> None:
    before = (where / "table.json").read_bytes()
    # The old one is served as well, so that the same search needs a third more to be judged by.
    result = run_command(*asked(where, "bursty.csv", "--out", str(where / "table.json"), "--budget", "3369"))
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["judged"]["wins"]
    assert not report["judged_against_old"]["wins"]
    assert "does not win against the table that is there" in report["notes"][-1]
    assert (where / "table.json").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "What is there cannot be compared"),
        (
            msgspec.json.encode(msgspec.structs.replace(learned_table(), version=2)),
            "it is of version 2, and this program reads version 1",
        ),
        (learned_table(machine="another").encode(), "is a table for 'tiny' on 'another'"),
    ],
)
@pytest.mark.long
def test_a_table_that_cannot_be_compared_is_said_and_replaced_by_one_that_beats_hybrid(
    where: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    out = tmp_path / "table.json"
    out.write_bytes(content)
    result = run_command(*asked(where, "bursty.csv", "--out", str(out)))
    assert result.exit_code == 0, result.output
    assert said in json.loads(result.stdout)["notes"][0]
    assert LearnedTable.load(out).machine == "profile two.json"


@pytest.mark.parametrize(
    ("trace", "more", "said"),
    [
        ("short.csv", (), "at least 400 requests over 240 s are needed"),
        ("bursty.csv", ("--budget", "1000"), "a budget of 1,000 simulated requests is too small"),
        ("bursty.csv", ("--out", "/nowhere/table.json"), "there is no directory"),
        ("bursty.csv", ("--days", "2"), "say one of --trace and --days"),
        ("bursty.csv", ("--slo", "ttft=0"), "must be above 0 s"),
    ],
)
def test_what_cannot_be_learned_from_is_a_clear_line(
    where: Path, trace: str, more: tuple[str, ...], said: str
) -> None:
    result = run_command(*asked(where, trace, *more))
    assert result.exit_code == 2
    assert said in result.output
    assert not isinstance(result.exception, ValueError)


def test_a_learned_table_is_simulated_beside_other_policies(where: Path) -> None:
    nothing = learned_table(dict.fromkeys(range(NUM_STATES), HYBRID), machine="profile two.json")
    (where / "hybrid.json").write_bytes(nothing.encode())
    common = ("simulate", "--trace", str(where / "short.csv"), "--profile", str(where / "two.json"), "--json")
    result = run_command(
        *common, "--policy", "hybrid,learned", "--policy-option", f"learned_table={where / 'hybrid.json'}"
    )
    assert result.exit_code == 0, result.output
    hybrid, as_hybrid = json.loads(result.stdout)["policies"]
    assert as_hybrid["policy"] == "learned"
    assert as_hybrid["e2e_s"] == hybrid["e2e_s"]
    acting = json.loads(run_command(*common, "--policy", "hybrid", "--control", "acting").stdout)
    assert acting["control"] == "acting"
    result = run_command(*common, "--policy", "learned")
    assert result.exit_code == 2
    assert "looks up a learned table" in result.output
