"""`fairgate policy`: answers and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import asdict

from engine.messages import DecodeSlots
from engine.scheduling.batch_or_wait.kv_pool import KvMemory
from engine.scheduling.batch_or_wait.table import BatchOrWaitTable
from engine.scheduling.policy import POLICIES
from ops.cli.policy.policy_live import slots_lines
from tests.support.commands import run_command

QUICK = ("--max-batch", "2", "--wait-buckets", "2")


def test_every_preset_is_listed_with_its_choices() -> None:
    listed = json.loads(run_command("policy", "list", "--json").stdout)["policies"]

    assert [item["policy"] for item in listed] == list(POLICIES)
    assert all(item["order"] and item["admit"] and item["compose"] and item["evict"] for item in listed)
    assert "dynamic" in run_command("policy", "list").stdout


@pytest.mark.parametrize("name", POLICIES)
def test_every_choice_has_a_rule_to_explain(name: str) -> None:
    answer = json.loads(run_command("policy", "explain", name, "--json").stdout)

    assert [choice["decision"] for choice in answer["choices"]] == ["order", "admit", "compose", "evict"]
    assert all(len(choice["rule"]) > 40 for choice in answer["choices"])


def test_an_unknown_policy_is_answered_with_those_that_exist() -> None:
    result = run_command("policy", "explain", "nope")

    assert result.exit_code == 2
    assert "no policy 'nope'" in result.output
    assert "hybrid" in result.output


def test_a_table_is_solved_and_stored(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    result = run_command("policy", "solve", "--rates", "2,0.5", *QUICK, "--out", str(out), "--json")

    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["bytes"] == out.stat().st_size
    assert BatchOrWaitTable.load(out).rates_per_s == [0.5, 2.0]
    assert [item["rate_per_s"] for item in answer["policies"]] == [0.5, 2.0]


def test_a_pool_makes_the_pressure_a_part_of_the_table(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    pool = ("--pool-tokens", "1000", "--kv-pressures", "0,0.6", "--pressure-hold-s", "5")
    result = run_command("policy", "solve", "--rates", "1", *QUICK, *pool, "--out", str(out), "--json")

    assert result.exit_code == 0, result.output
    assert [item["kv_pressure"] for item in json.loads(result.stdout)["policies"]] == [0.0, 0.6]
    assert BatchOrWaitTable.load(out).pool == KvMemory(1000, (0.0, 0.6), 5.0)


def test_lambda_is_another_word_for_rates_and_files_hold_step_times(tmp_path: Path) -> None:
    out, times = tmp_path / "table.json", tmp_path / "times.json"
    numbers = {"base_s": 0.5, "per_token_s": 0.0, "per_context_token_s": 0.0, "per_sequence_s": 0.0}
    times.write_text(json.dumps(numbers))
    arguments = ("--lambda", "1", "--step-time", str(times), "--short", "8,1", "--long", "16,2")
    result = run_command("policy", "solve", *arguments, *QUICK, "--out", str(out))

    assert result.exit_code == 0, result.output
    assert BatchOrWaitTable.load(out).model.service_s(1, 0) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rates", "0"), "above 0"),
        (("--rates", "x"), "must be numbers"),
        (("--alpha", "-1"), "alpha"),
        (("--slo-s", "0"), "slo_s"),
        (("--short", "512,128"), "more tokens"),
        (("--long", "7"), "prompt and output tokens"),
        (("--step-time", "0"), "first above 0"),
        (("--step-time", "1,2,3,4,5"), "these numbers"),
        (("--max-batch", "65"), "max-batch"),
        (("--wait-buckets", "100000"), "states"),
        (("--pool-tokens", "-1"), "pool tokens"),
        (("--pool-tokens", "639"), "hold no long request of 640 tokens"),
        (("--kv-pressures", "x"), "parts of the pool"),
        (("--kv-pressures", "0.5,0.2"), "must rise"),
        (("--kv-pressures", "0,1"), "0 <= pressure < 1"),
        (("--pressure-hold-s", "0"), "pressure_hold_s"),
        (("--longest-wait-s", "-1"), "longest_wait_s"),
        (("--long-share", "1.5"), "between 0 and 1"),
    ],
)
def test_what_cannot_be_solved_is_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    out = tmp_path / "table.json"
    result = run_command("policy", "solve", *arguments, "--out", str(out))

    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "table.json"
    result = run_command("policy", "solve", "--rates", "1", *QUICK, "--out", str(out))

    assert result.exit_code == 1
    assert "could not be written" in result.output


@pytest.mark.parametrize(
    ("slots", "rates", "wanted"),
    [
        (
            25,
            (2915.2, 3107.4),
            [
                "25 of 32 places decode in a step, by the measured step time (2,915 tokens/s of 3,107, 94%)",
                "weights 1 and 3 with half of the places each: 9 and 16 tokens of a step, 1 : 1.78; 1 : 3"
                " with slots=21 or fewer",
            ],
        ),
        (
            32,
            (0.0, 0.0),
            [
                "32 of 32 places decode in a step, by the measured step time"
                " (their cost is not measured yet)",
                "each sequence has a token of each step: weights decide who runs",
            ],
        ),
    ],
)
def test_the_slots_are_shown_with_their_cost_and_what_a_weight_gets(
    slots: int, rates: tuple[float, float], wanted: list[str]
) -> None:
    shown = DecodeSlots(slots, 32, True, *rates)
    assert slots_lines(asdict(shown)) == wanted
