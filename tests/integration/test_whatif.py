"""`fairgate whatif` replays what the ledger and the timelines hold, and refuses well."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ops.cli.main import cli
from tenants.admin.admin import Admin
from tenants.admin.commands import TenantCreate
from tenants.ledger import timelines
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow
from tenants.ledger.timelines import StoredTimeline
from tenants.storage.database import Database
from tenants.types import Amounts
from tests.unit.ops.simulate.test_recorded import timeline

NINE = datetime(2026, 3, 2, 9, tzinfo=UTC)
MACHINE = ("--gpu", "l40s", "--model", "1b")


@pytest.fixture
async def house(database: Database, pepper: bytes, database_url: str) -> str:
    """Five answers of acme, one of slow, from nine o'clock on, one a minute; its database's URL."""
    admin, ledger = Admin(database, pepper), Ledger(database)
    ids = {
        name: (await admin.create_tenant("test", TenantCreate(name=name, weight=2.0))).tenant_id
        for name in ("acme", "slow")
    }
    rows = []
    for number in range(6):
        tenant, model = ("slow", "large") if number == 5 else ("acme", "small")
        made = timeline(tenant, ttft_s=0.5 + number, e2e_s=10.0)
        at_us = int(NINE.timestamp() * 1e6) + number * 60_000_000
        request_id = f"req_{number}"
        rows.append(StoredTimeline(request_id, ids[tenant], at_us, made.packed))
        at = datetime.fromtimestamp(at_us / 1e6, UTC)
        settle = LedgerRow(
            request_id, "settle", ids[tenant], "prj", "key", "gw", "standard", model,
            Amounts(64, 21, 0, 1), "completed", at,
        )  # fmt: skip
        for kind in ("reserve", "settle"):  # a request is one, however many rows it has
            await ledger.append(
                LedgerRow(**{name: getattr(settle, name) for name in settle.__slots__} | {"kind": kind})
            )
    await timelines.add(database, rows)
    return database_url


def whatif(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["whatif", "--database-url", url, *arguments], prog_name="fairgate")


NINE_TO_TEN = ("--from", "2026-03-02T09:00", "--to", "2026-03-02T10:00")


async def test_rows_are_those_of_the_time_each_once(house: str, database: Database) -> None:
    nine_us = int(NINE.timestamp() * 1e6)

    found = await timelines.recorded(database, from_us=nine_us, to_us=nine_us + 300_000_000, most=10)

    assert [row.tenant for row in found] == ["acme"] * 5
    assert {(row.weight, row.model) for row in found} == {(2.0, "small")}
    assert [row.ended_us for row in found] == [nine_us + number * 60_000_000 for number in range(5)]
    first_two = await timelines.recorded(database, from_us=nine_us, to_us=nine_us + 300_000_000, most=2)
    assert first_two == found[:2]


def test_what_was_stands_beside_what_would_have_been(house: str) -> None:
    asked = (*NINE_TO_TEN, *MACHINE, "--of-model", "small", "--policy", "vtc", "--slo", "ttft=2")

    report = json.loads(whatif(house, *asked, "--json").stdout)

    assert report["source"] == "traffic of 2026-03-02 09:00 to 10:00 UTC"
    assert report["recorded"]["requests"] == report["policies"][0]["requests"] == 5
    assert report["recorded"]["ttft_s"]["p50"] == 2.5
    assert report["recorded"]["attainment"] == 0.4, "0.5 s and 1.5 s of five"
    assert report["policies"][0]["attainment"] == 1.0, "each had the device for itself"
    assert report["unserved"] == 0
    shown = whatif(house, *asked)
    assert shown.exit_code == 0, shown.output
    for words in ("as it was", "vtc", "TTFT p50", "0 requests ended without a token"):
        assert words in shown.output


def test_what_the_policy_in_force_falls_short_of_is_added_to_all(house: str, tmp_path: Path) -> None:
    learned = {"base_s": 0.01, "per_token_s": 0.001, "per_context_token_s": 0.0, "per_sequence_s": 0.0}
    (tmp_path / "engine-0.learned.json").write_text(json.dumps(learned), encoding="utf-8")
    asked = ("--data-dir", str(tmp_path), *NINE_TO_TEN, "--of-model", "small", "--policy", "vtc,fcfs")

    plain = json.loads(whatif(house, *asked, "--json").stdout)
    report = json.loads(whatif(house, *asked, "--served-by", "vtc", "--json").stdout)

    assert (plain["compared_requests"], report["compared_requests"]) == (None, 5)
    for without, found in zip(plain["policies"], report["policies"], strict=True):
        assert without["e2e_s"]["p50"] < 1.0
        assert found["e2e_s"]["p50"] == pytest.approx(10.0, abs=0.1), "as it took, alone on its machine"
        assert 0.4 < found["ttft_s"]["mean"] < 4.6
    assert "drawn at random from 5 requests" in whatif(house, *asked, "--served-by", "vtc").output


def test_twice_the_load_and_one_tenant_alone(house: str) -> None:
    asked = (*NINE_TO_TEN, *MACHINE, "--policy", "vtc", "--tenant", "slow", "--of-model", "large", "--json")
    report = json.loads(whatif(house, *asked, "--speed", "2").stdout)
    assert list(report["policies"][0]["tenants"]) == ["slow"]
    assert report["source"].endswith("(x2)")


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        (NINE_TO_TEN, "several models were served (large, small): say which one with --of-model", 1),
        ((*NINE_TO_TEN, "--of-model", "huge"), "no request of model 'huge'", 1),
        ((*NINE_TO_TEN, "--of-model", "small", "--tenant", "nobody"), "no request of tenant 'nobody'", 1),
        (("--last", "1m"), "no answer was recorded in that time", 1),
        (("--from", "2026-03-02T10:00", "--to", "2026-03-02T09:00"), "--from must lie before --to", 2),
        ((*NINE_TO_TEN, "--of-model", "small", "--policy", "best"), "no policy 'best'", 2),
        ((*NINE_TO_TEN, "--of-model", "small", "--speed", "0"), "speed must be above 0", 2),
        ((*NINE_TO_TEN, "--served-by", "vtc"), "leave out --gpu, --model and --profile", 2),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_way_out(
    house: str, arguments: tuple[str, ...], words: str, exit_code: int
) -> None:
    result = whatif(house, *MACHINE, *arguments)
    assert (result.exit_code, words in result.output) == (exit_code, True), result.output


def test_without_a_database_or_a_machine_it_says_so(house: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    nowhere = CliRunner().invoke(cli, ["whatif", "--data-dir", str(empty), *MACHINE])
    assert "no database in" in nowhere.output
    nothing = whatif(house, "--data-dir", str(empty), *NINE_TO_TEN)
    assert "no engine has learned its step times" in nothing.output


def test_the_machine_is_the_one_whose_engine_has_learned(house: str, tmp_path: Path) -> None:
    learned = tmp_path / "served"
    learned.mkdir()
    step_time = {"base_s": 0.25, "per_token_s": 0.0, "per_context_token_s": 0.0, "per_sequence_s": 0.0}
    (learned / "engine-0.learned.json").write_text(json.dumps({"step_time": step_time}))

    asked = ("--data-dir", str(learned), *NINE_TO_TEN, "--of-model", "small", "--policy", "vtc", "--json")
    report = json.loads(whatif(house, *asked).stdout)

    assert report["machine"] == "profile engine-0.learned.json"
    assert report["policies"][0]["tpot_s"]["p50"] == pytest.approx(0.25), "a step"
