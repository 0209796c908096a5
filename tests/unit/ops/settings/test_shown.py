"""Settings as people may read them: where each comes from, and no secret."""

from __future__ import annotations

import json
from pathlib import Path

from ops.settings.settings import SETTINGS, load
from ops.settings.shown import shown_settings, variables_of

PEPPER = "p" * 40
DATABASE = "postgresql://user:database-secret@db/fairgate"


def test_each_setting_says_what_set_it_and_secrets_only_that_they_are_set(tmp_path: Path) -> None:
    file = tmp_path / "fairgate.toml"
    file.write_text("[engine]\nthreads = 3\n[aliases]\nbig = {m = 1}\n")
    server = {"name": "a", "url": "http://user:server-secret@h/v1", "model": "m"}
    settings = load(
        {"port": 9000, "upstreams": json.dumps([server]), "database_url": DATABASE},
        {"FAIRGATE_PEPPER": PEPPER, "FAIRGATE_GATEWAY_MAX_QUEUED": "7"},
        file,
    )
    rows = {each.name: each for each in shown_settings(settings, settings)}
    assert list(rows) == [each.name for each in SETTINGS]
    assert (rows["port"].value, rows["port"].source) == ("9000", "flag --port")
    assert (rows["gateway.max_queued"].value, rows["gateway.max_queued"].source) == (
        "7",
        "environment variable FAIRGATE_GATEWAY_MAX_QUEUED",
    )
    assert (rows["engine.threads"].value, rows["engine.threads"].source) == (
        "3",
        f"file {file}, key engine.threads",
    )
    assert (rows["host"].value, rows["host"].source) == ("127.0.0.1", "")
    assert rows["aliases"].value == 'big={"m": 1}'
    assert rows["upstreams"].value == "a (m at http://h/v1)"
    assert (rows["database_url"].value, rows["redis_url"].value) == ("set", "not set")
    text = repr(rows)
    assert [secret for secret in (PEPPER, "database-secret", "server-secret") if secret in text] == []


def test_what_a_template_sets_is_said_to_come_from_it() -> None:
    given = load({"policy.template": "throughput", "engine.max_sequences": "3"})
    rows = {each.name: each for each in shown_settings(given, given.templated(4096))}
    assert (rows["policy.template"].value, rows["policy.template"].source) == (
        "throughput",
        "flag --template",
    )
    assert rows["engine.max_sequences"].source == "flag --engine-max-sequences"
    from_it = [each for each in rows.values() if each.source == "template throughput"]
    assert from_it
    assert all(each.name.startswith(("policy.", "engine.")) for each in from_it)


def test_engines_elsewhere_get_by_variables_what_was_given_here_and_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "fairgate.toml"
    file.write_text(
        'model = "tiny"\ndatabase_url = "postgresql://user:secret@db/fairgate"\n'
        '[engine]\nthreads = 3\nkv_memory = "64MiB"\n[policy]\nname = "vtc"\n'
    )
    given = load({}, {"FAIRGATE_ENGINE_DEVICE": "cpu", "FAIRGATE_TELEMETRY_SPANS_PER_S": "7"}, file)
    variables = variables_of(given)
    assert variables["FAIRGATE_MODEL"] == str(Path("tiny").absolute())
    assert "FAIRGATE_DATABASE_URL" not in variables
    there = load({}, variables)
    assert (there.engine, there.policy) == (given.engine, given.policy)
    assert there.telemetry.spans_per_s == 7
