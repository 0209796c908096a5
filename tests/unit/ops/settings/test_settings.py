"""Tests of the settings: precedence of the sources, and messages about bad values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.flow.control_rules import ControlMode
from ops.settings.settings import SETTINGS, SHIPPED_MODEL_NAME, SHIPPED_PRICE, BadSetting, Settings, load
from tenants.networks import network_of
from tenants.pricing.pricing import FREE
from tenants.types import Tier


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = write(tmp_path / "f.toml", 'port = 1\nhost = "file"\nlog_level = "debug"\npolicy = "fcfs"\n')
    environment = {"FAIRGATE_PORT": "2", "FAIRGATE_HOST": "environment", "HOME": "/nowhere"}
    settings = load({"port": 3, "host": None}, environment, config)
    assert (settings.port, settings.host, settings.policy.name) == (3, "environment", "fcfs")
    assert settings.engine == Settings().engine


def test_groups_are_tables_in_the_file_and_prefixes_elsewhere(tmp_path: Path) -> None:
    config = write(tmp_path / "f.toml", '[engine]\nthreads = 2\nkv_memory = "64MiB"\n')
    settings = load({"gateway.drain": 1.5}, {"FAIRGATE_ENGINE_MAX_SEQUENCES": "4"}, config)
    assert settings.engine.threads == 2
    assert settings.engine.kv_memory_bytes == 64 * 2**20
    assert settings.engine.max_sequences == 4
    assert settings.gateway.shutdown_grace_s == 1.5


def test_the_config_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    config = write(tmp_path / "f.toml", "port = 4321\n")
    assert load({}, {"FAIRGATE_CONFIG": str(config)}).port == 4321


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FAIRGATE_PORT", "80x"),
        ("FAIRGATE_PORT", "70000"),
        ("FAIRGATE_PORT", "-1"),
        ("FAIRGATE_PORT", "8000.5"),
        ("FAIRGATE_LOG_LEVEL", "loud"),
        ("FAIRGATE_GATEWAY_BODY_LIMIT", "2 elephants"),
        ("FAIRGATE_GATEWAY_DRAIN", "nan"),
        ("FAIRGATE_GATEWAY_DRAIN", "-1"),
        ("FAIRGATE_ENGINE_MAX_SEQUENCES", "0"),
        ("FAIRGATE_ENGINE_DEVICE", "tpu"),
        ("FAIRGATE_PRICES", "model=12"),
        ("FAIRGATE_TIER_PRICES", "express=3000"),
        ("FAIRGATE_REDIS_URL", "http://127.0.0.1"),
        ("FAIRGATE_DATABASE_URL", "mysql://x"),
        ("FAIRGATE_PEPPER", "short"),
        ("FAIRGATE_DATA_DIR", ""),
        ("FAIRGATE_HOST", ""),
    ],
)
def test_a_value_that_is_not_accepted_names_setting_source_and_what_is(name: str, value: str) -> None:
    row = next(row for row in SETTINGS if row.variable == name)
    with pytest.raises(BadSetting) as refused:
        load({}, {name: value})
    message = str(refused.value)
    assert row.name in message
    assert f"environment variable {name}" in message
    assert row.kind.accepts.split(",")[0] in message


def test_a_secret_is_not_repeated_when_it_is_refused() -> None:
    with pytest.raises(BadSetting) as refused:
        load({}, {"FAIRGATE_DATABASE_URL": "mysql://user:hunter2@host/db"})
    assert "hunter2" not in str(refused.value)
    given = load(
        {}, {"FAIRGATE_DATABASE_URL": "postgresql://user:hunter2@host/db", "FAIRGATE_PEPPER": "x" * 32}
    )
    assert "hunter2" not in repr(given)
    assert "x" * 32 not in repr(given)


def test_a_variable_may_name_the_file_of_a_secret(tmp_path: Path) -> None:
    pepper = write(tmp_path / "pepper", "p" * 40 + "\n")
    database = write(tmp_path / "url", "postgresql://fairgate:hunter2@db/fairgate\n")
    settings = load({}, {"FAIRGATE_PEPPER_FILE": str(pepper), "FAIRGATE_DATABASE_URL_FILE": str(database)})
    assert (settings.pepper, settings.database_url) == ("p" * 40, "postgresql://fairgate:hunter2@db/fairgate")
    assert settings.given["pepper"] == f"file {pepper} of FAIRGATE_PEPPER_FILE"
    with pytest.raises(BadSetting, match="FAIRGATE_PEPPER and FAIRGATE_PEPPER_FILE are both set"):
        load({}, {"FAIRGATE_PEPPER_FILE": str(pepper), "FAIRGATE_PEPPER": "x" * 32})
    with pytest.raises(BadSetting, match="unknown setting: environment variable FAIRGATE_PORT_FILE"):
        load({}, {"FAIRGATE_PORT_FILE": str(pepper)})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff" * 40, "is not text in UTF-8"),
        (b" \n", "must hold 1 to 16384 bytes"),
        (b"x" * 20_000, "must hold 1 to 16384 bytes"),
        (b"hunter2", "its value is not accepted"),
    ],
)
def test_a_bad_file_of_a_secret_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadSetting, match=why) as refused:
        load({}, {"FAIRGATE_PEPPER_FILE": str(path)})
    assert f"file {path} of FAIRGATE_PEPPER_FILE" in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_an_unknown_variable_stops_the_start_and_suggests_the_nearest() -> None:
    with pytest.raises(BadSetting, match=r"FAIRGATE_PROT.*did you mean FAIRGATE_PORT"):
        load({}, {"FAIRGATE_PROT": "1"})
    with pytest.raises(BadSetting, match=r"FAIRGATE_POLICY_NAME \(did you mean FAIRGATE_POLICY\?\)"):
        load({}, {"FAIRGATE_POLICY_NAME": "vtc"})


def test_variables_of_the_test_suite_are_not_settings() -> None:
    assert load({}, {"FAIRGATE_TEST_DATABASE_URL": "x", "OTHER": "y"}) == load()
    assert not any(row.variable.startswith("FAIRGATE_TEST_") for row in SETTINGS)


@pytest.mark.parametrize("text", ["prot = 1\n", "[engine]\nthread = 1\n", "[motor]\nx = 1\n", "engine = 3\n"])
def test_an_unknown_key_in_the_file_stops_the_start(tmp_path: Path, text: str) -> None:
    config = write(tmp_path / "f.toml", text)
    with pytest.raises(BadSetting, match="unknown setting") as refused:
        load({}, {}, config)
    assert str(config) in str(refused.value)


def test_a_file_that_is_missing_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"missing\.toml cannot be read"):
        load({}, {}, tmp_path / "missing.toml")
    with pytest.raises(BadSetting, match=r"broken\.toml is not TOML"):
        load({}, {}, write(tmp_path / "broken.toml", "port ="))


def test_a_price_table_reads_the_same_from_file_and_environment(tmp_path: Path) -> None:
    config = write(tmp_path / "f.toml", '[prices]\n"my/model" = "10/40/5"\n')
    from_file = load({}, {}, config).prices
    from_environment = load({}, {"FAIRGATE_PRICES": "my/model=10/40/5"}).prices
    assert from_file == from_environment
    assert from_file["my/model"].cached_input_nanousd == 5


def test_the_shipped_model_has_a_price_and_another_has_none_until_it_is_priced() -> None:
    assert load().model_prices == {SHIPPED_MODEL_NAME: SHIPPED_PRICE}
    other = load({"model": "/models/other"})
    assert other.served_model_name == "other"
    assert other.model_prices == {}
    free = load({"model": "/models/other", "prices": "other=0/0"})
    assert free.model_prices == {"other": FREE}


def test_the_database_defaults_to_sqlite_in_the_data_directory() -> None:
    assert load({"data_dir": "/somewhere"}).resolved_database_url == "sqlite:////somewhere/fairgate.db"
    url = load({"database_url": "postgresql://u@h/d"}).resolved_database_url
    assert url == "postgresql+psycopg://u@h/d"


def test_every_setting_is_in_the_table_with_help_and_accepted_values() -> None:
    assert all(row.help.endswith(".") and row.kind.accepts for row in SETTINGS)
    assert len({row.name for row in SETTINGS}) == len(SETTINGS)
    assert len({row.variable for row in SETTINGS}) == len(SETTINGS)
    assert len({row.flag for row in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize(
    ("name", "text", "attribute", "value"),
    [
        ("gateway.batch_share", "29", "batch_share", 0.29),
        ("gateway.quote_credit", "0", "quote_credit_share", 0.0),
        ("gateway.timeline_days", "30", "timeline_retention_s", 30 * 86_400.0),
        ("gateway.body_limit", "2 KiB", "max_body_bytes", 2048),
        ("gateway.max_queued", "1_000", "max_queued", 1000),
        ("gateway.estimates", "NO", "estimates", False),
        ("gateway.admission", "1.25", "admission", 1.25),
        ("gateway.control", "Advice", "control", ControlMode.ADVICE),
        (
            "gateway.trusted_proxies",
            "10.0.0.0/8, ::1",
            "trusted_proxies",
            (network_of("10.0.0.0/8"), network_of("::1")),
        ),
        ("gateway.ttl_batch", "9", "queue_ttl_s", GatewayConfig().queue_ttl_s | {Tier.BATCH: 9.0}),
    ],
)
def test_a_text_becomes_the_value_that_the_gateway_takes(
    name: str, text: str, attribute: str, value: object
) -> None:
    assert getattr(load({name: text}).gateway, attribute) == value


def test_every_default_is_accepted_by_its_own_parser() -> None:
    for row in SETTINGS:
        if row.default_text:
            assert row.kind(row.default_text) == row.default


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("[::1]:65535", ("[::1]", 65_535)),
        ("[fe80::1%eth0]:1", ("[fe80::1%eth0]", 1)),
        ("admin.example.org:0", ("admin.example.org", 0)),
    ],
)
def test_the_admin_listener_is_an_address_and_a_port(text: str, where: tuple[str, int]) -> None:
    assert load({}, {"FAIRGATE_ADMIN_LISTEN": text}).admin.host_and_port == where
    assert load().admin.host_and_port is None


@pytest.mark.parametrize(
    "text", ["", "https://console.example.org", "http://10.0.0.1:8000", "https://[2001:db8::1]:8443"]
)
def test_the_address_of_the_console_is_an_origin(text: str) -> None:
    assert load({}, {"FAIRGATE_GATEWAY_CONSOLE_URL": text}).gateway.console_url == text


@pytest.mark.parametrize(
    "text",
    [
        "console.example.org", "https://console.example.org/", "https://console.example.org/console",
        "https://user@console.example.org", "https://console.example.org:https",
        "javascript://console.example.org", "https://a\nb",
    ],
)  # fmt: skip
def test_what_is_no_address_of_a_console_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match=r"setting gateway\.console_url .*such as https://"):
        load({}, {"FAIRGATE_GATEWAY_CONSOLE_URL": text})


@pytest.mark.parametrize(
    "text",
    ["9000", ":9000", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:x", "::1:9000", "http://a:1", "a b:1"],
)
def test_half_an_address_of_an_admin_listener_is_refused(text: str) -> None:
    with pytest.raises(BadSetting, match=r"setting admin\.listen .*such as 127\.0\.0\.1:9000"):
        load({}, {"FAIRGATE_ADMIN_LISTEN": text})


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"name": "one", "address": "tcp://h:2"}, "the name 'one' is there twice"),
        ({"name": "two", "address": "tcp://h:1"}, "the address 'tcp://h:1' is there twice"),
        ({"name": "t wo", "address": "tcp://h:2"}, "name"),
        ({"name": "two", "address": "http://h:2"}, "address"),
        ({"name": "two", "address": "tcp://h:2", "key": "x"}, "key"),
    ],
)
def test_engines_have_names_and_addresses_of_their_own(
    tmp_path: Path, second: dict[str, str], problem: str
) -> None:
    file = tmp_path / "fairgate.toml"
    first = '[[engines]]\nname = "one"\naddress = "tcp://h:1"\nkeys = "/k"\n'
    file.write_text(first)
    assert [(each.name, each.address, each.keys) for each in load(config_file=file).engines] == [
        ("one", "tcp://h:1", "/k")
    ]
    file.write_text(f"{first}[[engines]]\n" + "".join(f'{key} = "{text}"\n' for key, text in second.items()))
    with pytest.raises(BadSetting, match=f"engines .*{problem}"):
        load(config_file=file)


@pytest.mark.parametrize(
    ("given", "lacks"),
    [
        ({}, "need PostgreSQL (set database_url) and Redis (set redis_url); or leave workers at 1"),
        ({"redis_url": "redis://h/0"}, "need PostgreSQL (set database_url); or"),
        ({"redis_url": "redis://h/0", "database_url": "sqlite:///x.db"}, "need PostgreSQL (set"),
        ({"database_url": "postgresql://h/x"}, "need Redis (set redis_url); or"),
    ],
)
def test_workers_need_what_they_share(given: dict[str, str], lacks: str) -> None:
    load(given).require_shared_stores()
    with pytest.raises(BadSetting, match=f"setting workers: 4 workers .*{re.escape(lacks)}"):
        load(given | {"workers": "4"}).require_shared_stores()
    both = {"redis_url": "redis://h/0", "database_url": "postgres://h/x", "workers": "4"}
    load(both).require_shared_stores()
