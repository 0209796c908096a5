"""`fairgate whatif` replays what the ledger and the timelines hold, and refuses well."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from engine.messages import StepTime
from gateway.config import GatewayConfig
from gateway.domain.server_description import (
    DescribedEngine,
    DescribedQueue,
    RequestTerms,
    ServerDescription,
    packed,
)
from ops import reporting
from ops.cli.main import cli
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.ledger import timelines
from tenants.ledger.ledger import Ledger
from tenants.ledger.rows import LedgerRow
from tenants.ledger.timelines import StoredTimeline
from tenants.nouns.tenant import TenantCreate
from tenants.storage.database import Database
from tenants.types import Amounts, Limit, Meter, SubjectKind, Window
from tests.support.chromium import CHROMIUM, problems_of_files
from tests.support.report_page import shown_report
from tests.unit.ops.simulate.test_recorded import timeline

NINE = datetime(2026, 3, 2, 9, tzinfo=UTC)
MACHINE = ("--gpu", "l40s", "--model", "1b")
STEP_TIME = StepTime(0.25, 0.0, 0.0, 0.0, samples=5_000, relative_error=0.1)
SERVER = ServerDescription(
    "gw_1",
    "small",
    False,
    (DescribedEngine("cpu", 512, 16, 64, 8, 256),),
    "vtc",
    {"slots": 4},
    DescribedQueue.of(GatewayConfig()),
    STEP_TIME,
)
TERMS = RequestTerms(2.0)


class Book:
    """Writes recordings: settled answers with timelines, as a gateway does."""

    def __init__(self, database: Database, tenants: dict[str, str]) -> None:
        self.database = database
        self.tenants = tenants

    async def answer(
        self,
        number: int,
        *,
        tenant: str = "acme",
        model: str = "small",
        ttft_s: float | None = None,
        output_tokens: int = 21,
        server: bytes | None = packed(SERVER),
        terms: RequestTerms = TERMS,
        request_id: str = "",
    ) -> None:
        """Number of the minute after nine at which it ended."""
        made = timeline(
            tenant, ttft_s=0.5 + number if ttft_s is None else ttft_s, e2e_s=10.0, output_tokens=output_tokens
        )
        at_us = int(NINE.timestamp() * 1e6) + number * 60_000_000
        request_id, at = request_id or f"req_{number}", datetime.fromtimestamp(at_us / 1e6, UTC)
        settle = LedgerRow(
            request_id, "settle", self.tenants[tenant], "prj", "key", "gw", "standard", model,
            Amounts(64, 21, 0, 1), "completed", at,
        )  # fmt: skip
        for kind in ("reserve", "settle"):  # a request is one, however many rows it has
            await Ledger(self.database).append(replace(settle, kind=kind))
        contents = {timelines.description_id(each): each for each in (server, packed(terms)) if each}
        ids = [None if each is None else timelines.description_id(each) for each in (server, packed(terms))]
        stored = StoredTimeline(request_id, self.tenants[tenant], at_us, made.packed, *ids)
        await timelines.add(self.database, [stored], contents)


@pytest.fixture
async def book(database: Database, pepper: bytes) -> Book:
    """Of the tenants acme and slow."""
    admin = Admin(Transactions(database, pepper))
    return Book(
        database,
        {
            name: (await admin.tenants.create("test", TenantCreate(name=name, weight=2.0))).tenant_id
            for name in ("acme", "slow")
        },
    )


@pytest.fixture
async def house(book: Book, database_url: str) -> str:
    """Five answers of acme, one of slow, from nine o'clock on, one a minute; its database's URL."""
    for number in range(5):
        await book.answer(number)
    await book.answer(5, tenant="slow", model="large", server=packed(replace(SERVER, model="large")))
    return database_url


def whatif(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["whatif", "--database-url", url, *arguments], prog_name="fairgate")


def report_of(url: str, *arguments: str) -> dict[str, Any]:
    answered = whatif(url, *NINE_TO_TEN, *arguments, "--json")
    assert answered.exit_code == 0, answered.output
    report: dict[str, Any] = json.loads(answered.stdout)
    return report


async def asked(url: str, *arguments: str) -> Result:
    """`whatif` has an event loop of its own."""
    return await asyncio.to_thread(whatif, url, *arguments)


async def reported(url: str, *arguments: str) -> dict[str, Any]:
    return await asyncio.to_thread(report_of, url, *arguments)


OFF = "The baseline is off by more than its stated error: "
NINE_TO_TEN = ("--from", "2026-03-02T09:00", "--to", "2026-03-02T10:00")
SMALL = ("--of-model", "small")


async def test_rows_are_those_of_the_time_each_once(house: str, database: Database) -> None:
    nine_us = int(NINE.timestamp() * 1e6)

    found = await timelines.recorded(database, from_us=nine_us, to_us=nine_us + 300_000_000, most=10)

    assert [row.tenant for row in found] == ["acme"] * 5
    assert {(row.weight, row.model) for row in found} == {(2.0, "small")}
    assert [row.ended_us for row in found] == [nine_us + number * 60_000_000 for number in range(5)]
    first_two = await timelines.recorded(database, from_us=nine_us, to_us=nine_us + 300_000_000, most=2)
    assert first_two == found[:2]


def test_the_server_is_the_one_that_served_whatever_this_shell_says(
    house: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRGATE_ENGINE_MAX_SEQUENCES", "77")
    monkeypatch.setenv("FAIRGATE_POLICY", "sjf")

    report = report_of(house, *SMALL, "--slo", "ttft=2")

    assert report["source"] == "traffic of 2026-03-02 09:00 to 10:00 UTC"
    assert report["machine"] == "small on cpu, as it served"
    sizes = ("replicas", "kv_tokens", "max_sequences", "max_batched_tokens")
    assert [report[name] for name in sizes] == [1, 1024, 8, 256]
    assert report["recorded"]["requests"] == 5
    assert report["recorded"]["ttft_s"]["p50"] == 2.5
    assert report["recorded"]["attainment"] == 0.4, "0.5 s and 1.5 s of five"
    [baseline] = report["policies"]
    assert (baseline["policy"], baseline["is_baseline"]) == ("vtc", True)
    assert baseline["e2e_s"]["p50"] == pytest.approx(10.0, abs=0.1), (
        "put right by what the others took longer"
    )
    assert (report["overrides"], report["warning"], report["unserved"]) == ([], None, 0)
    assert [each["figure"] for each in report["baseline"]] == ["ttft_p50", "ttft_p90", "e2e_p50", "e2e_p90"]
    assert report["baseline"][2]["simulated_alone_s"] == pytest.approx(21 * 0.25), "a step a token"
    assert {each["stated_error"] for each in report["baseline"]} == {None}, "five requests say nothing"
    shown = whatif(house, *NINE_TO_TEN, *SMALL).output
    for words in ("as it was", "baseline: vtc", "0 requests ended without a token", "not known of so few"):
        assert words in shown


def test_a_policy_adds_a_row_and_what_flags_replace_is_said(house: str) -> None:
    plain = report_of(house, *SMALL, "--policy", "vtc,fcfs")
    assert [row["policy"] for row in plain["policies"]] == ["vtc", "fcfs"]
    assert plain["compared_requests"] == 5
    assert plain["policies"][1]["e2e_s"]["p50"] == pytest.approx(10.0, abs=0.1)

    flags = ("--replicas", "2", "--max-sequences", "16", "--option", "slots=8", "--option", "cap-tokens=64")
    changed = report_of(house, *SMALL, *flags)
    assert [(row["policy"], "is_baseline" in row) for row in changed["policies"]] == [
        ("vtc", True),
        ("vtc", False),
    ]
    assert changed["overrides"] == [
        "replicas 2 (served: 1)",
        "max_sequences 16 (served: 8)",
        "option slots 8 (served: 4)",
        "option cap_tokens 64 (served: default)",
    ]
    assert (changed["replicas"], changed["max_sequences"]) == (2, 16)
    assert (
        "Instead of what served: replicas 2 (served: 1); "
        in whatif(house, *NINE_TO_TEN, *SMALL, *flags).output
    )


def test_another_machine_has_a_baseline_on_the_one_that_served(house: str) -> None:
    report = report_of(house, *SMALL, *MACHINE)
    assert [row["policy"] for row in report["policies"]] == ["vtc", "vtc"]
    assert (report["machine"], report["max_sequences"]) == ("1b on l40s", 8)
    assert report["overrides"][0] == "machine 1b on l40s (served: small on cpu, as it served)"
    assert report["policies"][1]["e2e_s"]["p50"] < 1.0, "what another machine falls short of is not known"
    assert report["compared_requests"] is None


def test_twice_the_load_and_one_tenant_alone(house: str) -> None:
    report = report_of(house, "--of-model", "large", "--tenant", "slow", "--speed", "2")
    assert [list(row["tenants"]) for row in report["policies"]] == [["slow"]] * 2
    assert report["source"].endswith("(x2)")


async def test_the_baseline_of_one_tenant_is_of_all_that_was_served(book: Book, database_url: str) -> None:
    for number in range(4):
        await book.answer(number, tenant="slow" if number else "acme")
    report = await reported(database_url, "--tenant", "slow")
    assert [row["requests"] for row in report["policies"]] == [4, 3]
    shown = (await asked(database_url, *NINE_TO_TEN, "--tenant", "slow")).output
    assert "The baseline is of all 4 requests, what is beside it of 3 of them." in shown


async def test_other_weights_and_limits_are_simulated_and_named(
    book: Book, database_url: str, tmp_path: Path
) -> None:
    """Both tenants ask for eight answers at a time, more than the server has places for."""
    for number in range(16):
        tenant = ("acme", "slow")[number % 2]
        nine = Limit("lim", tenant, SubjectKind.TENANT, tenant, Meter.REQUESTS, 9, Window.DAY)
        limited = replace(TERMS, limits=(nine,))
        await book.answer(0, tenant=tenant, terms=limited, request_id=f"req_{number}")
    before = await reported(database_url)
    assert before["overrides"] == []

    weighed = await reported(database_url, "--weight", "acme=8", "--weight", "slow=2")
    assert weighed["overrides"] == ["weight of acme 8 (served: 2)"]
    baseline, other = weighed["policies"]
    waits_s = [
        row["tenants"][name]["ttft_s"]["mean"] for row in (baseline, other) for name in ("acme", "slow")
    ]
    assert waits_s[2] < waits_s[0], "a greater weight waits less"
    assert waits_s[3] > waits_s[1]

    file = tmp_path / "limits.yaml"
    file.write_text(
        "version: 1\ntenants:\n- name: acme\n  limits:\n  - {meter: requests, window: day, amount: 3}\n"
        "- name: slow\n  limits:\n  - {meter: requests, window: day, state: absent}\n"
        "  - {meter: concurrency, amount: 1}\n- name: not-there\n  limits: []\n"
    )
    limited_more = await reported(database_url, "--limits", str(file))
    assert limited_more["overrides"] == [
        "acme: limit requests per day 3 (served: 9)",
        "slow: limit requests per day none (served: 9)",
        "slow: limit concurrency 1 (served: none)",
    ]
    baseline, other = limited_more["policies"]
    assert baseline["refused"] == 0
    acme, slow = other["tenants"]["acme"], other["tenants"]["slow"]
    # Until the day ends, which is as long as no client waits here.
    assert [acme["e2e_s"]["p50"] > 3_600, slow["refused"]] == [True, 0]
    assert slow["e2e_s"]["p99"] > baseline["tenants"]["slow"]["e2e_s"]["p99"], "one at a time"
    assert (await reported(database_url, "--weight", "acme=2"))["overrides"] == []


async def test_a_baseline_that_is_off_comes_first(book: Book, database_url: str, tmp_path: Path) -> None:
    """Every fifth answer was longer than the described server can compute: it was another one."""
    cramped = packed(replace(SERVER, engines=(DescribedEngine("cpu", 90, 16, 64, 8, 256),)))
    for number in range(40):
        await book.answer(number, server=cramped, ttft_s=0.5, output_tokens=21 if number % 5 else 42)

    report = await reported(database_url)
    assert next(iter(report)) == "warning"
    assert "TTFT p90 never came, and was 0.5 s (stated error 1.0 %)" in report["warning"]
    assert [each["is_within"] for each in report["baseline"]][1::2] == [False, False]
    assert (await asked(database_url, *NINE_TO_TEN)).output.startswith(OFF)
    path = tmp_path / "report-whatif.html"
    printed = await reported(database_url, "--html", str(path))
    assert 0 < path.read_text().index(OFF) < path.read_text().index("<table")
    page = shown_report(path)
    assert page.exact == printed
    assert page.column(0, "TTFT p50, s") == [
        reporting.number(each["ttft_s"]["p50"]) for each in (printed["recorded"], *printed["policies"])
    ]
    if CHROMIUM is not None:
        assert await asyncio.to_thread(problems_of_files, [path]) == []


async def test_a_server_that_changed_is_replayed_by_stretches(book: Book, database_url: str) -> None:
    other = packed(replace(SERVER, policy="fcfs", options={}, gateway_id="gw_2"))
    paced = packed(replace(SERVER, step_time=replace(STEP_TIME, base_s=0.35), gateway_id="gw_3"))
    for number in range(7):
        await book.answer(number, server={5: other, 6: paced}.get(number, packed(SERVER)))

    refused = await asked(database_url, *NINE_TO_TEN)
    assert refused.exit_code == 1
    stretch = (
        "--from 2026-03-02T09:00:00.000000 --to 2026-03-02T09:04:00.000001: 5 requests, vtc (slots=4), 1 x 8"
    )
    assert "the server changed in that time" in refused.output
    assert stretch in refused.output
    assert "1 requests, fcfs, 1 x 8 sequences, 256 tokens a step, 1024 of KV, gateway gw_2" in refused.output
    _, _, rest = refused.output.partition("--from")
    again = await asked(database_url, "--from", *rest.split(":  ")[0].split(": ")[0].split(), "--json")
    assert json.loads(again.stdout)["recorded"]["requests"] == 5
    assert (await reported(database_url, "--gateway", "gw_2"))["policies"][0]["policy"] == "fcfs"
    named = await reported(database_url, *MACHINE, "--policy", "srpt")
    assert [row["policy"] for row in named["policies"]] == ["srpt"]
    assert (
        "there are gw_1, gw_2, gw_3" in (await asked(database_url, *NINE_TO_TEN, "--gateway", "gw_9")).output
    )


async def test_step_times_are_the_mean_of_those_that_were_stored(book: Book, database_url: str) -> None:
    for number, base_s in enumerate((0.2, 0.4)):
        await book.answer(number, server=packed(replace(SERVER, step_time=replace(STEP_TIME, base_s=base_s))))
    report = await reported(database_url)
    assert report["baseline"][2]["simulated_alone_s"] == pytest.approx(21 * 0.3)


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (None, "all requests of that time were recorded by a version of Fairgate that did not store what"),
        (packed(replace(SERVER, version=9)), "recorded as version 9, and this program reads version 1"),
        (
            packed(replace(SERVER, is_foreign=True)),
            "other servers ran it, whose sizes and steps are not known",
        ),
        (packed(replace(SERVER, step_time=None)), "no engine had told its sizes and step times by then"),
        (
            packed(replace(SERVER, engines=(*SERVER.engines, DescribedEngine("cpu", 512, 16, 64, 4, 256)))),
            "its engines differ in size",
        ),
    ],
)
async def test_a_recording_that_does_not_say_what_served_is_refused_by_name_unless_flags_say_it(
    book: Book, database_url: str, server: bytes | None, why: str
) -> None:
    await book.answer(0, server=server)
    for flags in ((), MACHINE, ("--policy", "vtc")):
        refused = await asked(database_url, *NINE_TO_TEN, *flags)
        assert refused.exit_code == 1
        assert why in refused.output
        assert "--gpu with --model, or --profile, and --policy" in refused.output

    report = await reported(database_url, *MACHINE, "--policy", "vtc,fcfs")
    assert [row["policy"] for row in report["policies"]] == ["vtc", "fcfs"]
    assert "baseline" not in report
    assert "No baseline" in (await asked(database_url, *NINE_TO_TEN, *MACHINE, "--policy", "vtc")).output


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        (NINE_TO_TEN, "several models were served (large, small): say which one with --of-model", 1),
        ((*NINE_TO_TEN, "--of-model", "huge"), "no request of model 'huge'", 1),
        ((*NINE_TO_TEN, *SMALL, "--tenant", "nobody"), "no request of tenant 'nobody'", 1),
        (("--last", "1m"), "no answer was recorded in that time", 1),
        (("--from", "2026-03-02T10:00", "--to", "2026-03-02T09:00"), "--since must lie before --until", 2),
        ((*NINE_TO_TEN, *SMALL, "--policy", "best"), "no policy 'best'", 2),
        ((*NINE_TO_TEN, *SMALL, "--speed", "0"), "speed must be above 0", 2),
        ((*NINE_TO_TEN, *SMALL, "--weight", "acme"), "--weight 'acme' is not TENANT=WEIGHT", 2),
        ((*NINE_TO_TEN, *SMALL, "--weight", "acme=0"), "--weight 'acme=0': a weight lies between", 2),
        ((*NINE_TO_TEN, *SMALL, "--weight", "slow=2"), "no request of tenant 'slow' was answered", 1),
        ((*NINE_TO_TEN, *SMALL, "--limits", "none.yaml"), "none.yaml: cannot be read (No such file", 1),
        ((*NINE_TO_TEN, *SMALL, "--option", "slots"), "--option 'slots' is not NAME=VALUE", 2),
        (
            (*NINE_TO_TEN, *SMALL, "--option", "slots=-1"),
            "option slots takes auto, or a whole number from 0",
            2,
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_way_out(
    house: str, arguments: tuple[str, ...], words: str, exit_code: int
) -> None:
    result = whatif(house, *arguments)
    assert (result.exit_code, words in result.output) == (exit_code, True), result.output


def test_without_a_database_it_says_so(tmp_path: Path) -> None:
    nowhere = CliRunner().invoke(cli, ["whatif", "--data-dir", str(tmp_path)])
    assert "no database in" in nowhere.output
