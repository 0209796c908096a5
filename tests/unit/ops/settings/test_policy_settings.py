"""Settings of the policy: every option is one, from file, environment and flags."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from engine.scheduling.options import OPTIONS, PolicyOptions
from engine.scheduling.policy import CHOICES, DEFAULT_POLICY
from ops.cli.main import cli
from ops.cli.run.serve import serve
from ops.serving.composition import policy_options
from ops.settings.settings import SETTINGS, BadSetting, Settings, load
from tenants.errors import Invalid

OBJECTS = {"batch_or_wait_table"}
"""Attributes that hold what an option names, and are no options."""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_option_of_a_policy_is_a_setting() -> None:
    attributes = {each.name for each in fields(PolicyOptions)} - OBJECTS
    assert attributes == OPTIONS.keys(), "an option has bounds and a meaning in its annotation"
    rows = {row.name: row for row in SETTINGS if row.name.startswith("policy.")}
    assert rows.keys() == {"policy.name", "policy.template"} | {f"policy.{name}" for name in OPTIONS}
    for name, option in OPTIONS.items():
        assert rows[f"policy.{name}"].help == option.help


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_can_be_set_by_each_source_and_reaches_the_policy(tmp_path: Path, name: str) -> None:
    option = OPTIONS[name]
    value: object = (
        sorted(CHOICES[name])[0] if name in CHOICES else "/tables/t" if option.most is None else None
    )
    if value is None:
        value = option.kind(option.most) if name != "max_long_partial_prefills" else 1
    written = f"{value!r}".replace("'", '"')
    config = write(tmp_path / "f.toml", f"[policy]\nname = 'vtc'\n{name} = {written}\n")
    of_file = load({}, {}, config).policy
    assert of_file.name == "vtc"
    assert getattr(of_file.options, name) == value
    of_environment = load({}, {f"FAIRGATE_POLICY_{name.upper()}": str(value)}).policy
    assert of_environment.options == of_file.options
    assert load({f"policy.{name}": str(value)}).policy.options == of_file.options


def test_the_command_line_names_every_option() -> None:
    shown = CliRunner().invoke(cli, ["serve", "--help-all"]).output
    flags = {flag for param in serve.params if isinstance(param, click.Option) for flag in param.opts}
    assert {"--policy", "--policy-option", "--policy-table", "--policy-learned-table", "--template"} <= flags
    for name in OPTIONS:
        assert name in shown.replace("\n", ""), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("slots", "is not NAME=VALUE"),
        ("slot=3", r"unknown setting 'policy.slot' \(did you mean policy.slots\?\)"),
        (
            "slots=x",
            r"setting policy.slots \(flag --policy-option slots\): 'x' is not accepted; it takes auto, or a",
        ),
        ("order=lottery", "it takes one of buckets, dlpm"),
        ("max_long_partial_prefills=4096", None),
    ],
)
def test_an_option_on_the_command_line_is_checked(given: str, message: str | None) -> None:
    more = [] if message else ["--policy-option", "max_num_partial_prefills=2"]
    result = CliRunner().invoke(cli, ["serve", "--policy-option", given, *more])
    assert result.exit_code == 2
    text = " ".join(result.output.split())
    assert re.search(message or r"max_long_partial_prefills \(4096\) must not exceed", text), text


def test_the_words_from_before_the_table_are_still_read(tmp_path: Path) -> None:
    config = write(tmp_path / "f.toml", 'policy = "vtc"\npolicy_table = "t.json"\n')
    older = load({}, {}, config).policy
    assert (older.name, older.options.table) == ("vtc", str(Path("t.json").absolute()))
    assert load({}, {"FAIRGATE_POLICY": "sjf"}, config).policy.name == "sjf"
    assert load({}, {"FAIRGATE_POLICY_TABLE": "/u"}, config).policy.options.table == "/u"


def test_a_file_with_both_forms_is_refused_with_the_way_out(tmp_path: Path) -> None:
    config = write(tmp_path / "f.toml", 'policy_table = "t.json"\n[policy]\nname = "vtc"\n')
    with pytest.raises(
        BadSetting, match=r"the table \[policy\] and the older key policy_table: move it there"
    ) as told:
        load({}, {}, config)
    assert "table = 't.json'" in str(told.value)
    assert str(config) in str(told.value)


@pytest.mark.parametrize("table", ["[policy]\nslots = 3\n", "policy.slots = 3\n", "[policy]\n"])
def test_a_file_with_the_older_key_policy_and_the_table_is_refused_by_name(
    tmp_path: Path, table: str
) -> None:
    config = write(tmp_path / "f.toml", f'policy = "vtc"\n{table}')
    with pytest.raises(
        BadSetting, match=r"f.toml has the table \[policy\] and the older key policy: move it there, as `name"
    ):
        load({}, {}, config)
    other = write(tmp_path / "g.toml", 'policy = "vtc"\nport = \n')
    with pytest.raises(BadSetting, match=r"g.toml is not TOML"):
        load({}, {}, other)


def test_the_default_is_hybrid_with_its_own_options() -> None:
    assert (Settings().policy.name, Settings().policy.options) == (DEFAULT_POLICY, PolicyOptions())
    assert DEFAULT_POLICY == "hybrid"


def test_a_template_sets_what_nothing_else_did() -> None:
    settings = load({"policy.template": "interactive"}).templated(8000)
    assert settings.policy.options == PolicyOptions(
        compose="decode-first", max_num_partial_prefills=2, long_prefill_token_threshold=320
    )
    assert (settings.engine.max_batched_tokens, settings.engine.max_sequences) == (16_000, 128)
    given = {
        "policy.template": "interactive",
        "policy.long_prefill_token_threshold": "0",
        "engine.max_sequences": "9",
    }
    mixed = load(given).templated(8000)
    wanted = PolicyOptions(compose="decode-first", max_num_partial_prefills=2)
    assert mixed.policy.options == wanted, "also where it is the default"
    assert (mixed.engine.max_batched_tokens, mixed.engine.max_sequences) == (16_000, 9)
    assert load({"policy.template": "throughput"}).templated(1 << 20).engine.max_batched_tokens == 131_072
    assert load().templated(8000) == load()
    fair = {"policy.template": "interactive", "policy.compose": "token-fair"}
    left = PolicyOptions(compose="token-fair", max_num_partial_prefills=2)
    assert load(fair).templated(8000).policy.options == left, "nothing that does nothing there"
    both = {"policy.template": "interactive", "policy.max_long_partial_prefills": "3"}
    with pytest.raises(
        BadSetting, match=r"setting policy.template: max_long_partial_prefills \(3\) must not exceed"
    ):
        load(both).templated(8000)


def test_a_start_with_an_option_that_does_nothing_is_refused_with_the_reason() -> None:
    settings = load({"policy.name": "fcfs", "policy.slots": "3"})
    with pytest.raises(Invalid, match="option slots does nothing here: the composition is decode-first"):
        policy_options(settings)
    assert policy_options(load({"policy.name": "fcfs", "policy.slots": "auto"})) == PolicyOptions()
