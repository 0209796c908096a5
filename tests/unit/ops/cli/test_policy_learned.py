"""`fairgate policy list` and `explain` of the learned policy: its table in words, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.flow.learned.table_file import Judged
from tests.support.commands import run_command
from tests.support.learned_tables import learned_table


def setting(table: Path) -> dict[str, str]:
    return {"FAIRGATE_POLICY_LEARNED_TABLE": str(table)}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    path.write_bytes(learned_table(machine="8b on h100", judged=Judged(51.0, 50.0, 2.0)).encode())
    return path


def test_the_table_is_explained_in_words_also_where_it_does_not_win(table: Path) -> None:
    by_flag = run_command("policy", "explain", "learned", "--learned-table", str(table))
    by_setting = run_command("policy", "explain", "learned", env=setting(table))
    for result in (by_flag, by_setting):
        assert result.exit_code == 0, result.output
        for words in (
            "fitted on by hand for tiny on 8b on h100, with seed 1 and 0 simulated requests",
            "outside of it (more than queued_per_place 8, kv_share 0.95, trend 6) it is hybrid",
            "it does not win on requests that it had not seen: its sum is 51, that of hybrid 50",
            "learned is made for: a load whose kinds come again",
        ):
            assert words in result.output
    answer = json.loads(run_command("policy", "explain", "learned", "--json", env=setting(table)).stdout)
    assert len(answer["learned"]["states"]) == 12
    assert answer["learned"]["states"][4]["unlike_hybrid"][0].startswith("50% of the sequences")
    assert answer["options"]["learned_table"] == str(table)


def test_without_a_table_the_choices_are_explained_and_the_list_names_what_it_needs(table: Path) -> None:
    plain = json.loads(run_command("policy", "explain", "learned", "--json").stdout)
    hybrid = json.loads(run_command("policy", "explain", "hybrid", "--json").stdout)
    assert (plain["choices"], plain["claims"]) == (hybrid["choices"], hybrid["claims"])
    assert "learned" not in plain
    told = run_command("policy", "list").stdout
    assert "learned: needs a table (`fairgate policy learn`) in the setting policy.learned_table" in told
    listed = json.loads(run_command("policy", "list", "--json", env=setting(table)).stdout)
    assert listed["policies"][-1]["policy"] == "learned"
    assert listed["need_table"] == ["table"]


def test_a_bad_table_and_one_for_another_policy_are_refused(tmp_path: Path, table: Path) -> None:
    table.write_text("[]")
    broken = run_command("policy", "explain", "learned", "--learned-table", str(table))
    assert broken.exit_code == 1
    assert f"{table}: it is no table of a learned policy" in broken.output
    other = run_command("policy", "explain", "hybrid", "--learned-table", str(table))
    assert other.exit_code == 2
    assert "--learned-table is for learned, not for hybrid" in other.output
    large = tmp_path / "large.json"
    large.write_bytes(b" " * ((1 << 16) + 1))
    refused = run_command("policy", "explain", "learned", "--learned-table", str(large))
    assert "it has more than a table's 65,536 bytes" in refused.output
