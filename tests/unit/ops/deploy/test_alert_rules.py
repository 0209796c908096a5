"""The Prometheus rules of the SLO alerts: `promtool` reads them, and each alert fires when it should."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.config import AuditSettings, GatewayConfig
from ops.cli.main import cli
from ops.deploy.alert_rules import COMMITTED, as_yaml, out_of_date, rules, window
from tenants.outbox.kinds import BY_SUBJECT
from tenants.slo.slo import ALERTS, DEFAULT_LEAST_MISSES, Alert
from tests.support.prometheus import promtool

CHECKPOINT_S, BACKUP_S = AuditSettings().checkpoint_s, GatewayConfig().backup_late_s
DEFAULTS = rules(DEFAULT_LEAST_MISSES, CHECKPOINT_S, BACKUP_S)
LABELS = {"job": "fairgate", "tier": "standard", "metric": "ttft"}
STEPS_OF_SHORT, STEPS_OF_LONG = 5, 60
"""Scrapes in the windows of each alert: the long one is twelve times the short one."""
REQUESTS, ALLOWED = 100.0, 0.05
"""A step, and the share of them that the target allows to be missed."""


def counter(increases: list[float], reset_at: int | None) -> str:
    """A series' samples; the process is restarted at `reset_at`, and counts from zero again."""
    samples = list(accumulate(increases, initial=0.0))
    if reset_at is not None:
        samples[reset_at:] = [each - samples[reset_at] for each in samples[reset_at:]]
    return " ".join(f"{each:g}" for each in samples)


def case(
    alert: Alert, missed: list[float], total: list[float], *, fires: bool, reset_at: int | None = None
) -> Any:
    """A test of one alert, two long windows after the first sample."""
    step = window(alert.short_s // STEPS_OF_SHORT)
    inner = ",".join(f'{name}="{value}"' for name, value in LABELS.items())
    (found,) = [each for each in DEFAULTS["groups"][0]["rules"] if each.get("alert") == NAMES[alert]]
    texts = {
        name: text.replace("{{ $labels.tier }} {{ $labels.metric }}", "standard ttft")
        for name, text in found["annotations"].items()
    }
    expected = [{"exp_labels": LABELS | found["labels"], "exp_annotations": texts}] if fires else []
    allowed = counter([each * ALLOWED for each in total], reset_at)
    return {
        "interval": step,
        "input_series": [
            {
                "series": f'fairgate_slo_requests_total{{met="no",instance="a",{inner}}}',
                "values": counter(missed, reset_at),
            },
            {"series": f'fairgate_slo_allowed_misses_total{{instance="a",{inner}}}', "values": allowed},
        ],
        "alert_rule_test": [
            {"eval_time": window(2 * alert.long_s), "alertname": NAMES[alert], "exp_alerts": expected}
        ],
    }


NAMES = {alert: f"FairgateSloBurn{window(alert.long_s)}" for alert in ALERTS}


def cases(alert: Alert) -> list[Any]:
    """What the alert sees in the two long windows, and whether it fires."""
    number = 2 * STEPS_OF_LONG
    total = [REQUESTS] * number

    def burning(times: float) -> list[float]:
        return [REQUESTS * ALLOWED * alert.rate * times] * number

    over = burning(1.1)[:-STEPS_OF_SHORT] + [0.0] * STEPS_OF_SHORT
    quiet = [0.0] * STEPS_OF_LONG
    few, enough = (
        quiet + [each / 2] + quiet[:-STEPS_OF_SHORT] + [each / 2] + [0.0] * (STEPS_OF_SHORT - 2)
        for each in (DEFAULT_LEAST_MISSES - 2.0, DEFAULT_LEAST_MISSES + 2.0)
    )
    middle = number - 2
    return [
        case(alert, burning(1.1), total, fires=True),
        case(alert, burning(0.9), total, fires=False),
        case(alert, over, total, fires=False),
        # Low traffic of which all was missed: too little, and enough.
        case(alert, few, few, fires=False),
        case(alert, enough, enough, fires=True),
        # The process is restarted, and its counters with it.
        case(alert, burning(1.1), total, fires=True, reset_at=middle),
        case(alert, burning(0.9), total, fires=False, reset_at=middle),
    ]


def test_the_committed_rules_are_up_to_date() -> None:
    """On a difference: `fairgate alerts rules > ops/deploy/prometheus/fairgate.rules.yml`."""
    assert COMMITTED.read_text() == as_yaml(DEFAULTS)


def test_the_command_prints_them_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(cli, ["alerts", "rules"]).output == COMMITTED.read_text()
    monkeypatch.setenv("FAIRGATE_GATEWAY_ALERT_MISSES", "3")
    printed = json.loads(CliRunner().invoke(cli, ["alerts", "rules", "--json"]).output)
    alerts = [each["expr"] for each in printed["groups"][0]["rules"] if "alert" in each]
    assert len(alerts) == len(ALERTS)
    assert all(each.endswith(">= 3") for each in alerts)


def test_without_an_age_there_is_no_rule_of_backups() -> None:
    named = {each["alert"] for each in rules(10, CHECKPOINT_S, 0.0)["groups"][1]["rules"]}
    assert HEALTH.keys() - named == {"FairgateBackupLate"}


def test_runbooks_are_named_where_browsers_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRGATE_GATEWAY_CONSOLE_URL", "https://gate.example")
    printed = json.loads(CliRunner().invoke(cli, ["alerts", "rules", "--json"]).output)
    alerts = [each for group in printed["groups"] for each in group["rules"] if "alert" in each]
    assert {each["annotations"]["runbook_url"] for each in alerts} == {
        f"https://gate.example/runbooks/{subject}"
        for subject in BY_SUBJECT.keys()
        - {"calibration.off", "key.expires", "limit.exhaustion", "limit.soft"}
    }


def test_promtool_reads_them() -> None:
    assert "SUCCESS: 15 rules found" in promtool("check", "rules", str(COMMITTED), silent=False)


@pytest.mark.parametrize("alert", ALERTS, ids=NAMES.get)
def test_an_alert_fires_when_it_should(alert: Alert, tmp_path: Path) -> None:
    assert_fires(tmp_path, window(alert.short_s // STEPS_OF_SHORT), list(cases(alert)))


HEALTH: dict[str, tuple[str, dict[str, bool]]] = {
    # The last time it is gone for less than a minute.
    "FairgateReplicaDown": (
        'fairgate_engine_up{job="fairgate",instance="a",replica="one"}',
        {"1x3 0x20": True, "1x25": False, "1x18 0x3": False},
    ),
    "FairgateHoldsLeaked": (
        'fairgate_holds_overdue{job="fairgate",instance="a"}',
        {"2x20": True, "0x15 2x10": False},
    ),
    "FairgateLedgerDrift": (
        'fairgate_ledger_drift_problems{job="fairgate",instance="a"}',
        {"0x9 3x20": True, "0x20": False},
    ),
    "FairgateAuditDamaged": (
        'fairgate_audit_damaged{job="fairgate",instance="a"}',
        {"0x9 1x20": True, "0x20": False},
    ),
    "FairgateAuditLate": (
        'fairgate_audit_checkpoint_age_seconds{job="fairgate",instance="a"}',
        {"30+30x20": True, "0x15 30 60 90 120": False},
    ),
    "FairgateBackupLate": (
        'fairgate_backup_age_seconds{job="fairgate",instance="a"}',
        {"129000+60x30": True, "129000+60x10 0x20": False},
    ),
    # Low traffic, and a process that was restarted, whose counter begins anew.
    "FairgateSaturation": (
        'fairgate_refusals_total{job="fairgate",instance="a",code="queue_full"}',
        {"0+2x20": True, "0x15 0 3 6 6 6": False, "500x10 0x10": False},
    ),
}
"""By alert: a series, and which of its samples make it fire after ten minutes."""


def assert_fires(tmp_path: Path, interval: str, cases: list[Any]) -> None:
    content = {"rule_files": [str(COMMITTED)], "evaluation_interval": interval, "tests": cases}
    tests = tmp_path / "tests.yml"
    tests.write_text(json.dumps(content))
    assert "SUCCESS" in promtool("test", "rules", str(tests), silent=False)


def test_each_alert_of_the_installation_fires_when_it_should(tmp_path: Path) -> None:
    tests = []
    for found in DEFAULTS["groups"][1]["rules"]:
        series, cases = HEALTH[found["alert"]]
        labels = {"job": "fairgate"} | ({"replica": "one"} if "replica=" in series else {})
        texts = {
            key: text.replace("{{ $labels.replica }}", "one") for key, text in found["annotations"].items()
        }
        firing = [{"exp_labels": labels | found["labels"], "exp_annotations": texts}]
        tests += [
            {
                "interval": "30s",
                "input_series": [{"series": series, "values": values}],
                "alert_rule_test": [
                    {"eval_time": "10m", "alertname": found["alert"], "exp_alerts": firing if fires else []}
                ],
            }
            for values, fires in cases.items()
        ]
    assert len(tests) >= 2 * len(HEALTH)
    assert_fires(tmp_path, "30s", tests)


def test_doctor_says_that_a_rule_file_is_out_of_date(tmp_path: Path) -> None:
    expected = as_yaml(DEFAULTS)
    assert out_of_date(COMMITTED, expected) == ""
    old = tmp_path / "old.yml"
    old.write_text(as_yaml(rules(DEFAULT_LEAST_MISSES + 1, CHECKPOINT_S, BACKUP_S)))
    assert "is not what these settings" in out_of_date(old, expected)
    assert "cannot be read" in out_of_date(tmp_path / "none.yml", expected)
    old.write_bytes(b"\xff")
    assert "it is no text" in out_of_date(old, expected)
