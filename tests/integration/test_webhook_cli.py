"""`fairgate webhook` and `fairgate alerts list` on a database without a server."""

from __future__ import annotations

from pathlib import Path

from tests.integration.test_person_cli import answer_of, data_dir, fairgate

__all__ = ["data_dir"]
URL = "https://1.1.1.1/a-path-that-is-a-secret"


def test_a_webhook_is_added_tested_listed_and_removed(data_dir: Path) -> None:
    answer_of(data_dir, "tenant", "create", "acme")
    made = answer_of(data_dir, "webhook", "add", URL, "--tenant", "acme", "--subject", "limit.soft")
    assert (made["tenant"], made["host"], made["subjects"]) == ("acme", "https://1.1.1.1", ["limit.soft"])
    assert made["secret"].startswith("whsec_")
    put = answer_of(data_dir, "webhook", "test", made["id"])
    assert (put["subject"], put["state"], put["attempts"]) == ("webhook.test", "pending", 0)
    [listed] = answer_of(data_dir, "webhook", "list")
    assert listed["deliveries"] == {"pending": 1}
    assert "secret" not in str(listed)
    [delivery] = answer_of(data_dir, "webhook", "deliveries", made["id"], "--state", "pending")
    assert delivery["event"] == put["event"]
    assert answer_of(data_dir, "webhook", "resend", made["id"])["events"] == 0
    refused = fairgate(data_dir, "webhook", "resend", made["id"], "--seq", "7")
    assert (refused.exit_code, refused.stderr) == (1, "Error: no such dead letter: '7'\n")
    for text, shown in (("list", "1.1.1.1"), ("deliveries", "webhook.test")):
        arguments = [made["id"]] if text == "deliveries" else []
        assert shown in fairgate(data_dir, "webhook", text, *arguments).stdout
    assert answer_of(data_dir, "webhook", "remove", made["id"])["id"] == made["id"]
    assert answer_of(data_dir, "webhook", "list") == []
    assert answer_of(data_dir, "alerts", "list", "--state", "firing") == []
    rows = answer_of(data_dir, "audit", "list", "--act", "webhook")["data"]
    assert len(rows) == 4
    assert "a-path-that-is-a-secret" not in str(rows)


def test_a_private_address_is_refused_with_the_way_out(data_dir: Path) -> None:
    refused = fairgate(data_dir, "webhook", "add", "https://127.0.0.1/")
    assert refused.exit_code == 1
    assert "stands for a private address; allow it with the setting gateway.webhook_private" in refused.stderr
