"""Help texts, refusals and JSON answers of the command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest

from ops.cli.admin.limit import in_words
from ops.cli.main import cli
from ops.cli.options import Duration, PastInstant
from tenants.types import Limit, LimitMode, Meter, SubjectKind, Tier, Window
from tests.support.commands import run_command


@pytest.fixture(scope="module")
def new_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tables of a new database, and nothing in them."""
    path = tmp_path_factory.mktemp("new") / "data"
    assert run_command("db", "upgrade", "--data-dir", str(path)).exit_code == 0
    return path


@pytest.fixture
def data_dir(tmp_path: Path, new_data_dir: Path) -> str:
    return str(shutil.copytree(new_data_dir, tmp_path / "data"))


def answer_of(*arguments: str) -> Any:
    result = run_command(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands(cli))
DAILY = "limit set --meter requests --window day --amount 5"


def test_the_commands_are_those_of_the_documentation() -> None:
    acts = {
        "audit": "export list",
        "bench": "calibration fairness",
        "db": "current downgrade upgrade",
        "key": "create list revoke rotate",
        "ledger": "verify",
        "limit": "list override remove set show",
        "price": "history list set",
        "project": "create list resume suspend",
        "request": "cancel list move",
        "tenant": "create list resume set show suspend",
    }
    assert {(group, act) for group, names in acts.items() for act in names.split()} | {("top",)} <= set(ALL)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_takes_the_data_directory_and_explains_itself_and_its_answer_in_json(
    path: tuple[str, ...],
) -> None:
    result = run_command(*path, "--help")
    assert result.exit_code == 0
    assert "--data-dir" in result.output
    assert "fairgate" in result.output or "--json answers" in result.output
    if path == ("engine",):
        assert "answers nothing on stdout" in result.output
    if not isinstance(ALL[path], click.Group):
        assert "--json" in result.output
        assert "{" in result.output or "answers what" in result.output


def test_start_up_loads_neither_torch_nor_the_gateway() -> None:
    code = (
        "import sys, ops.cli.main as m\n"
        "try: m.cli.main(['--help'], prog_name='fairgate')\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'transformers', 'litestar', 'uvicorn'} & set(sys.modules)\n"
        "print('loaded', sorted(loaded))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.endswith("loaded []\n")


def test_version_is_said() -> None:
    assert run_command("--version").output.startswith("fairgate, version ")


def test_the_data_directory_may_stand_at_every_level_and_the_innermost_wins(tmp_path: Path) -> None:
    inner, outer = str(tmp_path / "inner"), str(tmp_path / "outer")
    for arguments in (
        ["--data-dir", outer, "db", "--data-dir", outer, "upgrade", "--data-dir", inner],
        ["--data-dir", inner, "db", "current"],
        ["db", "--data-dir", inner, "current"],
    ):
        assert run_command(*arguments).exit_code == 0
    assert (tmp_path / "inner" / "fairgate.db").exists()
    assert not (tmp_path / "outer").exists()


def test_a_tenant_its_key_and_its_limits_from_the_command_line(data_dir: str) -> None:
    at = ("--data-dir", data_dir, "--json")
    tenant = answer_of("tenant", "create", "acme", "--weight", "2", "--tier", "interactive", *at)
    assert (tenant["name"], tenant["weight"], tenant["default_tier"]) == ("acme", 2.0, "interactive")
    key = answer_of("key", "create", "--tenant", "acme", "--project", "new", "--expires-in", "30d", *at)
    assert key["key"].startswith(key["prefix"])
    assert key["id"].startswith("key_")
    limit = answer_of(
        "limit", "set", "--tenant", "acme", "--key", key["id"], "--meter", "total_tokens", "--window", "day",
        "--amount", "1000", *at,
    )  # fmt: skip
    assert (limit["kind"], limit["amount"], limit["mode"]) == ("key", 1000, "hard")
    shown = answer_of("tenant", "show", "acme", *at)
    assert [item["id"] for item in shown["limits"]] == [limit["id"]]
    assert [item["id"] for item in shown["keys"]] == [key["id"]]
    assert key["key"] not in json.dumps(shown)
    assert answer_of("limit", "remove", limit["id"], *at) == {"id": limit["id"], "removed": True}
    assert answer_of("limit", "list", *at) == []
    rotated = answer_of("key", "rotate", key["id"], "--grace", "1m", *at)
    assert rotated["id"] == key["id"]
    assert rotated["key"] != key["key"]
    assert answer_of("key", "revoke", key["id"], *at)["revoked_at"] is not None
    listed = answer_of("key", "list", "--tenant", "acme", *at)
    assert [item["status"] for item in listed] == ["revoked"]
    assert answer_of("tenant", "suspend", "acme", *at)["status"] == "suspended"


def test_limits_of_all_subjects_from_the_command_line(data_dir: str) -> None:
    at = ("--data-dir", data_dir, "--json")
    answer_of("tenant", "create", "acme", *at)
    daily = ("--meter", "requests", "--window", "day", "--amount", "5")
    shared = answer_of("limit", "set", "--platform", "--model", "large", "--tier", "batch", *daily, *at)
    assert (shared["kind"], shared["tenant_id"], shared["model"]) == ("platform", None, "large")
    each = answer_of("limit", "set", "--tenant", "acme", "--each-end-user", "--above", "8000", *daily, *at)
    amy = answer_of("limit", "set", "--tenant", "acme", "--end-user", "amy", *daily, *at)
    assert (each["kind"], each["above_tokens"], each["end_user"]) == ("end_user", 8_000, None)
    assert (amy["end_user"], amy["subject_id"][:4]) == ("amy", "usr_")
    text = run_command("limit", "list", *at[:2]).stdout
    for part in ("all tenants together", "model large", "each end user of", "above 8,000", "end user amy of"):
        assert part in " ".join(text.split())
    assert "no server runs" in run_command("limit", "show", amy["id"], *at[:2]).stdout
    shown = answer_of("limit", "list", "--tenant", "acme", *at)
    assert [(item["id"], item["usage"]) for item in shown] == [(each["id"], None), (amy["id"], None)]


def test_a_ceiling_from_the_command_line(data_dir: str) -> None:
    at = ("--data-dir", data_dir, "--json")
    answer_of("tenant", "create", "acme", *at)
    rate = ("limit", "set", "--tenant", "acme", "--meter", "output_tokens", "--rate", "50", "--burst", "500")
    made = answer_of(*rate, "--tier", "batch", "--ceiling", "400.5", *at)
    assert (made["rate_per_s"], made["ceiling_per_s"]) == (50.0, 400.5)
    words = "50 output_tokens a second (up to 400.5 by spare capacity), bursts up to 500 (hard, tier batch)"
    assert words in run_command("limit", "show", made["id"], *at[:2]).stdout
    answer_of("limit", "override", made["id"], "--amount", "100", "--rate-per-s", "5", "--for", "2h",
              "--reason", "incident", *at)  # fmt: skip
    shown = answer_of("limit", "show", made["id"], *at)
    assert shown["in_force"] == {"amount": 100, "rate_per_s": 5.0, "ceiling_per_s": None}
    again = answer_of(*rate, "--tier", "batch", *at)
    assert (again["id"], again["ceiling_per_s"]) == (made["id"], None), "set again without one it has none"
    for arguments, said in (
        (("--tier", "batch", "--ceiling", "49"), "below rate_per_s, 50, which is promised"),
        (("--tier", "standard", "--ceiling", "60"), "add tier batch"),
        (("--tier", "batch", "--ceiling", "60", "--soft"), "a soft limit refuses nothing"),
        (("--tier", "batch", "--ceiling", "60", "--each-end-user"), "add up without a bound"),
    ):
        refused = run_command(*rate, *arguments, *at[:2])
        assert refused.exit_code == 2
        assert said in refused.stderr


def test_an_override_from_the_command_line(data_dir: str) -> None:
    at = ("--data-dir", data_dir, "--json")
    answer_of("tenant", "create", "acme", *at)
    assert "acme has no limits" in run_command("limit", "list", "--tenant", "acme", *at[:2]).stdout
    assert "no limits" in run_command("tenant", "show", "acme", *at[:2]).stdout
    limit = answer_of(
        "limit", "set", "--tenant", "acme", "--meter", "gpu_ms", "--window", "day", "--amount", "1000",
        "--soft", "--threshold", "90", "--threshold", "50", *at,
    )  # fmt: skip
    assert (limit["thresholds"], limit["override"]) == ([50, 90], None)
    id_ = limit["id"]
    made = answer_of("limit", "override", id_, "--amount", "5000", "--for", "2h", "--reason", "launch", *at)
    assert (made["amount"], made["override"]["amount"], made["override"]["reason"]) == (1000, 5000, "launch")
    shown = answer_of("limit", "show", id_, *at)
    assert shown["in_force"] == {"amount": 5000, "rate_per_s": None, "ceiling_per_s": None}
    assert (shown["overridden"], shown["events"]) == (True, [])
    assert answer_of("limit", "list", *at) == [shown]
    assert "5,000 until" in run_command("limit", "list", *at[:2]).stdout
    text = run_command("limit", "show", id_, *at[:2]).stdout
    assert "launch" in text
    assert "alerts at 50 %, 90 %" in text
    cleared = answer_of("limit", "override", id_, "--clear", *at)
    assert cleared == limit
    past = run_command(
        "limit", "override", id_, "--amount", "1", "--until", "2020-01-01T00:00:00Z", "--reason", "r", *at[:2]
    )
    assert past.exit_code == 1
    assert "until: has already passed" in past.stderr


def test_prices_from_the_command_line(data_dir: str) -> None:
    at = ("--data-dir", data_dir, "--json")
    assert answer_of("price", "list", *at) == []
    made = answer_of("price", "set", "my/model", "--input", "150", "--output", "600", *at)
    assert [(row["tier"], row["multiplier"], row["cached_input_nanousd"]) for row in made] == [
        ("interactive", 2000, 150), ("standard", 1000, 150), ("batch", 500, 150),
    ]  # fmt: skip
    answer_of("price", "set", "my/model", "--tier", "batch", "--cached-weight", "100", *at)
    answer_of("price", "set", "tiny", "--free", *at)
    listed = answer_of("price", "list", *at)
    assert {(row["model"], row["tier"], row["version"]) for row in listed} == {
        ("my/model", "interactive", 1), ("my/model", "standard", 1), ("my/model", "batch", 2),
        ("tiny", "interactive", 3), ("tiny", "standard", 3), ("tiny", "batch", 3),
    }  # fmt: skip
    history = answer_of("price", "history", "my/model", *at)
    assert [row["version"] for row in history] == [2, 1, 1, 1]
    [batch] = re.findall("batch.*", run_command("price", "list", *at[:2]).stdout)[:1]
    assert batch.split()[1:9] == ["$0.15", "$0.15", "$0.6", "0.5", "1", "0.1", "1", "1"]
    unpriced = run_command("price", "set", "other", "--output", "5", *at[:2])
    assert (unpriced.exit_code, "input_nanousd: is missing" in unpriced.stderr) == (1, True)


def test_multipliers_of_a_new_model_come_from_the_settings(
    data_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRGATE_TIER_PRICES", "interactive=7000")
    made = answer_of("price", "set", "m", "--free", "--data-dir", data_dir, "--json")
    assert [row["multiplier"] for row in made] == [7000, 1000, 500]


def test_a_tenant_is_changed_from_the_command_line(data_dir: str) -> None:
    at = ("--data-dir", data_dir, "--json")
    assert answer_of("tenant", "create", "acme", *at)["on_low_budget"] == "refuse"
    changed = answer_of("tenant", "set", "acme", "--on-low-budget", "truncate", "--weight", "3", *at)
    assert (changed["on_low_budget"], changed["weight"], changed["default_tier"]) == (
        "truncate",
        3,
        "standard",
    )
    reserved = answer_of("tenant", "set", "acme", "--reserve", "2000", *at)
    assert reserved["reserved_tokens_per_s"] == 2000
    reserved = answer_of("tenant", "set", "acme", "--reserve-tier", "interactive", *at)
    assert reserved["reserved_tier"] == "interactive"
    shown = run_command("tenant", "show", "acme", "--data-dir", data_dir).output
    assert "reserved: 2000 cost tokens per second, for interactive requests" in shown
    answer_of("tenant", "suspend", "acme", *at)
    assert answer_of("tenant", "resume", "acme", *at)["status"] == "active"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tenant create x --weight 0", "--weight"),
        ("tenant create x --on-low-budget ignore", "--on-low-budget"),
        ("tenant set x", "--weight"),
        ("tenant set x --reserve -1", "--reserve"),
        ("tenant set x --reserve-tier cheap", "--reserve-tier"),
        ("limit override lim_x --amount 5 --for 2h", "--reason"),
        ("limit override lim_x --amount 5 --reason r", "--until"),
        ("limit override lim_x --amount -5 --for 2h --reason r", "--amount"),
        ("limit override lim_x --amount 5 --until tomorrow --reason r", "--until"),
        ("limit override lim_x --clear --amount 5", "--clear"),
        (f"{DAILY} --tenant a --threshold 80", "--threshold"),
        (f"{DAILY} --tenant a --soft --threshold 0", "--threshold"),
        (f"{DAILY} --tenant a --tier gold", "--tier"),
        (DAILY, "--tenant"),
        (f"{DAILY} --tenant a --platform", "--platform"),
        (f"{DAILY} --tenant a --end-user x --each-end-user", "--each-end-user"),
        (f"{DAILY} --tenant a --above -1", "--above"),
        ("price set m", "--input"),
        ("price set m --input -1", "--input"),
        ("price set m --free --tier gold", "--tier"),
        ("tenant create x --weight nan", "weight"),
        ("tenant create x --tier express", "--tier"),
        ("key create", "--tenant"),
        ("key create --tenant a --scope everything", "--scope"),
        ("key create --tenant a --expires-in soon", "--expires-in"),
        ("limit set --tenant a --meter total_tokens", "--window"),
        ("limit set --tenant a --meter total_tokens --amount 5", "--window"),
        ("limit set --tenant a --meter requests --rate 5", "--burst"),
        ("limit set --tenant a --meter gpu --window day --amount 5", "--meter"),
        ("limit set --tenant a --meter requests --window day --amount -5", "--amount"),
        (f"{DAILY} --tenant a --soft --shadow", "--soft"),
        (f"{DAILY} --tenant a --ceiling 9", "--ceiling: only a rate has a ceiling"),
        ("frobnicate", "frobnicate"),
    ],
)
def test_asked_wrongly_is_exit_code_2_and_names_the_option(arguments: str, said: str, data_dir: str) -> None:
    words = arguments.split()
    result = run_command(*words, *(("--data-dir", data_dir) if len(words) > 1 else ()))
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tenant", "show", "nobody"), "nobody"),
        (("key", "create", "--tenant", "nobody"), "nobody"),
        (("key", "revoke", "key_nothing"), "key_nothing"),
        (("limit", "remove", "lim_nothing"), "lim_nothing"),
        (("limit", "show", "lim_nothing"), "lim_nothing"),
        (("limit", "override", "lim_nothing", "--clear"), "lim_nothing"),
        (("price", "history", "nothing"), "nothing"),
        (("limit", "list", "--tenant", "nobody"), "nobody"),
        (("price", "set", "m", "--input", "1", "--cached", "2", "--output", "1"), "cached_input_nanousd"),
        (("tenant", "create", "a name that is / no name"), "name"),
    ],
)
def test_what_fails_is_one_line_on_stderr_and_exit_code_1(
    arguments: tuple[str, ...], said: str, data_dir: str
) -> None:
    result = run_command(*arguments, "--data-dir", data_dir)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_name_that_is_taken_is_refused(data_dir: str) -> None:
    assert run_command("tenant", "create", "acme", "--data-dir", data_dir).exit_code == 0
    again = run_command("tenant", "create", "acme", "--data-dir", data_dir)
    assert again.exit_code == 1
    assert "acme" in again.stderr


def test_without_a_database_the_way_out_is_named(tmp_path: Path) -> None:
    result = run_command("tenant", "list", "--data-dir", str(tmp_path / "nothing"))
    assert result.exit_code == 1
    assert "fairgate serve" in result.stderr
    assert not (tmp_path / "nothing").exists()


def test_a_bad_setting_stops_any_command_with_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRGATE_PROT", "1")
    result = run_command("tenant", "list")
    assert result.exit_code == 2
    assert "FAIRGATE_PROT" in result.stderr


def test_the_database_goes_down_and_up_again(data_dir: str) -> None:
    at = ("--data-dir", data_dir, "--json")
    up = answer_of("db", "current", *at)
    assert up["is_current"]
    assert answer_of("db", "downgrade", "base", *at) == {
        "revision": None,
        "head": up["head"],
        "is_current": False,
        "contracted": None,
        "oldest_release": None,
        "backfills": [],
    }
    assert answer_of("db", "upgrade", *at) == up
    unknown = run_command("db", "upgrade", "no-such-revision", "--data-dir", data_dir)
    assert unknown.exit_code == 1
    assert "no-such-revision" in unknown.stderr


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("2m", 120), ("12h", 43_200), ("30d", 2_592_000)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-5m", "1.5h", "forever", "5y"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Duration().convert(text, None, None)


def test_limits_are_said_in_words() -> None:
    def limit(**fields: object) -> str:
        base = {"limit_id": "l", "tenant_id": "t", "kind": SubjectKind.TENANT, "subject_id": "t"}
        return in_words(Limit(**(base | fields)))  # type: ignore[arg-type]

    assert (
        limit(meter=Meter.TOTAL_TOKENS, amount=1_000_000, window=Window.DAY)
        == "1,000,000 total_tokens a day (hard)"
    )
    assert limit(meter=Meter.REQUESTS, amount=5, window=Window.LIFETIME) == "5 requests altogether (hard)"
    assert (
        limit(meter=Meter.OUTPUT_TOKENS, amount=50, rate_per_s=2.5, mode=LimitMode.SOFT, tier=Tier.BATCH)
        == "2.5 output_tokens a second, bursts up to 50 (soft, tier batch)"
    )
    assert limit(meter=Meter.CONCURRENCY, amount=3) == "3 requests at once (hard)"


def test_an_instant_is_iso_8601_or_a_time_ago() -> None:
    at = "2026-01-31T18:00:00+01:00"
    assert PastInstant().convert(at, None, None) == at
    before = datetime.now(UTC)
    a_day_ago = datetime.fromisoformat(PastInstant().convert("24h", None, None))
    assert before <= a_day_ago + timedelta(hours=24) <= datetime.now(UTC)


@pytest.mark.parametrize("text", ["tomorrow", "2026-01-31T18:00:00", "0h", "24", "999999999w", ""])
def test_what_is_no_instant_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        PastInstant().convert(text, None, None)


@pytest.mark.parametrize("command", [("top",), ("request", "list"), ("request", "cancel", "req_1")])
def test_a_command_for_a_running_server_says_that_there_is_none(
    data_dir: str, command: tuple[str, ...]
) -> None:
    result = run_command(*command, "--data-dir", data_dir)
    assert result.exit_code == 1
    assert "start one with `fairgate serve`" in result.stderr


def test_projects_and_acts_without_a_server(data_dir: str, tmp_path: Path) -> None:
    at = ("--data-dir", data_dir)
    answer_of("tenant", "create", "acme", *at, "--json")
    answer_of("project", "create", "chatbot", "--tenant", "acme", *at, "--json")
    assert (
        "project 'chatbot' already exists"
        in run_command("project", "create", "chatbot", "--tenant", "acme", *at).output
    )
    assert (
        answer_of("project", "suspend", "chatbot", "--tenant", "acme", *at, "--json")["status"] == "suspended"
    )
    by_name = run_command("project", "resume", "chatbot", *at)
    assert (by_name.exit_code, "tenant: is needed beside the project's name" in by_name.output) == (1, True)
    page = answer_of("audit", "list", "--limit", "1", *at, "--json")
    assert [row["action"] for row in page["data"]] == ["project.suspend"]
    shown = run_command("audit", "list", "--limit", "1", "--since", "1h", *at).output
    again = next(line for line in shown.splitlines() if line.startswith("more: "))
    rest = run_command(*shlex.split(again.removeprefix("more: fairgate ")), *at)
    assert rest.exit_code == 0, rest.output
    assert "project.create" in rest.output
    assert run_command("audit", "export", "--output", str(tmp_path / "no" / "x"), *at).exit_code == 1
    assert not list(tmp_path.glob("**/*.partial"))
    wrong = run_command("audit", "list", "--act", "tennant", *at)
    assert "tenant, project, key" in wrong.output


def test_help_has_groups_whole_sentences_and_the_common_options_once() -> None:
    root = run_command("--help").output
    headings = ["Run", "Administer", "Watch", "Money", "Policy", "Develop"]
    assert re.findall(r"^(\w+):$", root, re.MULTILINE) == ["Options", *headings]
    rows = root[root.index("Run:") :].splitlines()
    assert all(re.match(r"  \w+ +\S.*\.$", row) for row in rows if row.startswith(" ")), "each on one line"
    assert "Data directory." in root
    assert "Data directory." not in run_command("tenant", "--help").output


def test_serve_shows_what_a_newcomer_needs_and_all_settings_when_asked() -> None:
    short, whole = (run_command("serve", option).output for option in ("--help", "--help-all"))
    assert ("--engine-threads" in short, "--gateway-lease" in short) == (True, False)
    assert "--gateway-lease" in whole
    assert len(short.splitlines()) < 90


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tenat list", "Did you mean 'tenant'?"),
        ("key creat", "Did you mean 'create'?"),
        ("brake --tenant acme --share 0.1", "fairgate limit set --tenant acme --meter concurrency"),
        ("price set m --input 0.15", "150 = $0.15 per million tokens"),
        ("brake --tier batch --share ten --for 1h", "such as 12.5 or 50 %"),
        ("limit set --meter requests --tenant a --amount 5 --threshold 2k", "at most 1,000"),
        (f"{DAILY[:-1]}many --tenant a", "such as 1000, 1,000 or 1.5k"),
        ("quote hi", "fairgate key create"),
    ],
)
def test_a_wrong_command_is_answered_with_the_right_one(arguments: str, said: str) -> None:
    result = run_command(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())


def test_the_nearest_name_is_suggested_and_numbers_are_taken_as_people_type_them(data_dir: str) -> None:
    at = ("--data-dir", data_dir)
    answer_of("tenant", "create", "acme", *at, "--json")
    assert "no such tenant: 'acm'. Did you mean 'acme'?" in run_command("tenant", "show", "acm", *at).stderr
    daily = ("limit", "set", "--tenant", "acme", "--meter", "requests", "--window", "day", "--soft")
    made = answer_of(*daily, "--amount", "1.5m", "--threshold", "80 %", *at, "--json")
    assert (made["amount"], made["thresholds"]) == (1_500_000, [80])
    brake = answer_of("brake", "--tier", "batch", "--share", "10%", "--for", "1h", *at, "--json")
    assert brake["share"] == 0.1


@pytest.mark.parametrize("options", [("--since", "--until"), ("--from", "--to"), ("--last", "--until")])
def test_all_lists_take_the_same_times(options: tuple[str, str], data_dir: str) -> None:
    first, last = options
    for command in (("policy", "moves"), ("refusal", "list"), ("usage", "show"), ("audit", "list")):
        if first != "--last" or command == ("policy", "moves"):
            result = run_command(*command, first, "yesterday", last, "1m", "--data-dir", data_dir)
            assert result.exit_code == 0, result.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_that_says_how_to_install_it(shell: str) -> None:
    script = run_command("completion", shell).stdout
    assert script.startswith("# To install, ")
    assert "_FAIRGATE_COMPLETE" in script
