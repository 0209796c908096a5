"""Alerts of a real server reach a webhook once each, through the receiver's outages and `kill -9`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from tenants.outbox.kinds import BY_SUBJECT
from tenants.outbox.runbooks import runbook
from tests.support.prometheus import value
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.webhook_receiver import Receiver, receiving

WAIT_S = 60.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


def added(server: Server, receiver: Receiver, **fields: object) -> str:
    """A webhook to the receiver; returns its id."""
    made = server.admin("POST", "/webhooks", {"url": receiver.url} | fields)
    assert made["host"] == f"http://127.0.0.1:{receiver.port}"
    receiver.secret = made["secret"]
    found: str = made["id"]
    return found


def tried(server: Server, webhook: str, subject: str) -> list[Any]:
    """Events that wait for another attempt."""
    pending = server.admin("GET", f"/webhooks/{webhook}/deliveries?state=pending")["data"]
    return [each for each in pending if each["subject"] == subject and each["attempts"]]


def test_a_tenants_alerts_arrive_once_through_an_outage_of_the_receiver(
    server: Server, receiver: Receiver
) -> None:
    key = server.tenant("spender")
    limit = server.limit("spender", "requests", 2, window="day", mode="soft")
    webhook = added(server, receiver, tenant="spender")
    server.admin("POST", f"/webhooks/{webhook}/test")
    until(lambda: receiver.of("webhook.test"), WAIT_S)

    receiver.stop()
    with server.http(key) as client:
        for _ in range(2):
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            client.post("/v1/completions", json=body).raise_for_status()
    until(lambda: tried(server, webhook, "limit.soft"), WAIT_S)
    [waiting] = tried(server, webhook, "limit.soft")
    assert (waiting["tenant"], waiting["error"]) == ("spender", "it could not be reached: ConnectError")
    receiver.start()
    until(lambda: len(receiver.of("limit.soft", state="firing")) == 2, WAIT_S)
    assert [each["data"]["evidence"]["level"] for each in receiver.of("limit.soft")] == [80, 100]
    firing = {each["data"]["incident"] for each in receiver.of("limit.soft")}
    server.admin("DELETE", f"/limits/{limit}")
    until(lambda: len(receiver.of("limit.soft", state="resolved")) == 2, WAIT_S)
    assert {each["data"]["incident"] for each in receiver.of("limit.soft", state="resolved")} == firing
    assert {each["data"]["tenant"] for each in receiver.of("limit.soft")} == {"spender"}
    assert len(receiver.of("limit.soft")) == 4
    [page] = {each["data"]["runbook"] for each in receiver.of("limit.soft")}
    with server.http() as client:
        assert client.get(page).text.startswith("# limit.soft\n")
        # What evaluates alerts has read the age of the newest backup as well.
        assert (value(client.get("/metrics").text, "fairgate_backup_age_seconds") or 0.0) > 0
    server.admin("DELETE", f"/webhooks/{webhook}")


def test_each_runbook_is_served_without_a_key_and_its_links_lead_to_others(server: Server) -> None:
    linked = 0
    with server.http() as client:
        for subject in BY_SUBJECT:
            path = f"/runbooks/{subject}"
            answer = client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (
                200,
                "text/markdown; charset=utf-8",
            )
            assert answer.text == runbook(subject)
            for link in re.findall(r"\]\(([^)]+)\)", answer.text):
                linked += 1
                assert client.get(urljoin(path, link)).text.startswith(f"# {link.removesuffix('.md')}\n")
        shown = client.get("/runbooks/saturation", headers={"accept": "text/html,*/*"})
        assert shown.headers["content-type"] == "text/plain; charset=utf-8"
        for unknown in ("nothing", "..%2Fsettings", "%2E%2E"):
            assert client.get(f"/runbooks/{unknown}").status_code == 404
    assert linked >= 3


@pytest.mark.long
def test_an_incident_is_told_once_through_a_kill(
    tmp_path: Path, chat_model: Path, receiver: Receiver
) -> None:
    flags = ["--gateway-alert-every", "0.2", "--gateway-webhook-private", "yes"]
    flags += ["--audit-checkpoint-every", "1"]
    with server_process(tmp_path, chat_model, *flags) as alerting:
        webhook = added(alerting, receiver)
        alerting.tenant("soon")
        until(lambda: receiver.of("audit.checkpoint"), WAIT_S)
        receiver.stop()
        created = alerting.admin("POST", "/keys", {"tenant": "soon", "expires_in_s": 3_600})
        until(lambda: tried(alerting, webhook, "key.expires"), WAIT_S)
        alerting.kill()
        alerting.start()
        receiver.start()
        until(lambda: receiver.of("key.expires"), WAIT_S)
        [alert] = alerting.admin("GET", "/alerts?state=firing")["data"]
        assert alert["page"] == f"/console/tenants/{alert['tenant_id']}/keys/{created['id']}"

        alerting.admin("DELETE", f"/keys/{created['id']}")
        until(lambda: len(receiver.of("key.expires")) == 2, WAIT_S)
        told = receiver.of("key.expires", incident=alert["id"])
        assert [each["data"]["state"] for each in told] == ["firing", "resolved"]
        assert alerting.admin("GET", "/alerts?state=firing")["data"] == []
        sizes = [each["data"]["size"] for each in receiver.of("audit.checkpoint")]
        assert sizes == sorted(set(sizes))
