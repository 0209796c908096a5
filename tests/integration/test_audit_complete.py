"""Every form and command that changes something leaves exactly one row in the audit.

Which ones there are, the application says: a new one without a line here fails. Routes are in
`tests/contract/test_resources.py`, the steps of `fairgate apply` in `test_config_file.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from litestar import Litestar
from sqlalchemy import create_engine, select

from ops.cli.main import cli
from tenants.admin.admin import Admin
from tenants.admin.audit import LINK, Actor
from tenants.admin.transaction import Transactions
from tenants.admin.webhooks import WebhookAdd
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.tenant import TenantCreate
from tenants.people.person import PersonInvite
from tenants.slo.target import SloSet
from tenants.storage import tables
from tenants.storage.database import open_database
from tests.e2e.test_authorisation import RULES
from tests.support.console import HASH, PASSWORD, Browser
from tests.support.documents import routes
from tests.support.gateway_app import PEPPER, gateway_and_app
from tests.unit.ops.cli.test_parity import ROUTES

ROOT = Actor("cli:root", "cli")
"""Cheap, and checked as any other."""
REPO = Path(__file__).parents[2]
BY_AN_OPERATOR = "tests/e2e/test_waiting_requests.py::test_an_operator_may_and_it_is_audited"
BY_FORM = "tests/e2e/test_console_live.py::test_a_move_shows_its_price_first_and_both_acts_are_in_the_audit"
ELSEWHERE = {
    "DELETE /admin/v1/requests/{request_id}": BY_AN_OPERATOR,
    "POST /admin/v1/requests/{request_id}/tier": BY_AN_OPERATOR,
    "POST /admin/v1/ledger/adjust": (
        "tests/attack/test_both_killed.py::test_what_was_held_in_doubt_can_be_given_back_once"
    ),
    "POST /console/waiting/{request_id}/cancel": BY_FORM,
    "POST /console/waiting/{request_id}/move": BY_FORM,
    **dict.fromkeys(
        (f"POST /console/alerts/{{reference}}/{act}" for act in ("acknowledge", "silence", "unsilence")),
        "tests/integration/test_console_alerts.py::test_an_alert_is_acknowledged_and_silenced",
    ),
    "POST /console/policy/change": (
        "tests/integration/test_console_acts.py::test_the_policy_is_changed_through_a_page_that_says_what_changes"
    ),
    "POST /console/policy/what-if/{run}/apply": (
        "tests/e2e/test_console_policy.py::test_a_what_if_is_that_of_the_command_line_and_can_be_applied"
    ),
}
"""Those that need a request in flight or a run of the simulator: each with the test that sees its row."""
NO_ACT = {
    "POST /console/policy/what-if": "it computes beside the server, and changes nothing",
    "POST /console/policy/what-if/{run}/cancel": "it ends such a computation",
}
RECEIVER = "http://127.0.0.1:9/"
TENANT_FORM = {
    "weight": "2",
    "default_tier": "standard",
    "tier_standard": "yes",
    "tier_batch": "yes",
    "on_low_budget": "refuse",
    "reserved_tokens_per_s": "0",
    "reserved_tier": "all",
}
ACME = "/console/tenants/acme"
KEY = "/console/tenants/{tenant}/keys/{key}"
LIMIT = "/console/tenants/{tenant}/limits/{limit}"
FORMS: list[tuple[str, str, dict[str, str]]] = [
    ("/console/people/invite", "/console/people", {"name": "new", "role": "auditor", "password": PASSWORD}),
    ("/console/people/{person}", "", {"act": "suspend", "password": PASSWORD}),
    ("/console/sessions/end", "/console/sessions", {"session": "{session}"}),
    ("/console/tenants", "", {"name": "made"} | TENANT_FORM),
    ("/console/tenants/{tenant}/change", "", TENANT_FORM),
    ("/console/tenants/{tenant}/suspend", "", {}),
    ("/console/tenants/{tenant}/resume", ACME, {}),
    ("/console/tenants/{tenant}/projects", "", {"name": "search"}),
    ("/console/tenants/{tenant}/projects/{project}/suspend", "", {}),
    ("/console/tenants/{tenant}/projects/{project}/resume", ACME + "/projects", {}),
    ("/console/tenants/{tenant}/keys", "", {"name": "web", "scope_inference": "yes"}),
    (f"{KEY}/change", "", {"name": "mine", "scope_inference": "yes"}),
    (f"{KEY}/rotate", KEY, {"grace_h": "0"}),
    (f"{KEY}/revoke", "", {}),
    (
        "/console/tenants/{tenant}/limits",
        "",
        {"on": "tenant", "meter": "total_tokens", "amount": "10", "window": "day", "mode": "hard"},
    ),
    ("/console/limits", "", {"meter": "requests", "amount": "10", "window": "day", "mode": "hard"}),
    ("/console/limits/{platform_limit}", "", {"act": "changed", "amount": "7", "mode": "hard"}),
    ("/console/limits/{platform_limit}/remove", "", {}),
    (LIMIT, "", {"act": "changed", "amount": "7", "mode": "hard"}),
    (f"{LIMIT}/remove", "", {}),
    ("/console/policy/brake/set", "", {"tier": "batch", "share": "10 %", "for_s": "1h"}),
    ("/console/policy/brake/{reference}/end", "/console/policy/brake/batch/end", {}),
    ("/console/slo/targets/set", "", {"tier": "standard", "metric": "ttft", "target_s": "2"}),
    ("/console/slo/targets/{reference}/remove", "/console/slo/targets/{slo}/remove", {}),
    ("/console/aliases/set", "", {"name": "big", "means": "model-1"}),
    ("/console/aliases/{reference}/remove", "/console/aliases/big/remove", {}),
    ("/console/prices/set", "", {"model": "other", "free": "yes"}),
    ("/console/upstreams/{replica}/drain", "", {"reason": "driver"}),
    ("/console/upstreams/{replica}/resume", "/console/upstreams", {}),
    ("/console/alerts/webhooks", "/console/alerts", {"url": RECEIVER}),
    ("/console/alerts/webhooks/{webhook}", "", {"act": "test"}),
    ("/console/alerts/webhooks/{webhook}/remove", "", {}),
    (
        "/console/password",
        "",
        {"current": PASSWORD, "password": f"new {PASSWORD}", "repeat": f"new {PASSWORD}"},
    ),
    ("/console/log-out", "/console", {}),
    ("/console/log-in", "", {"name": "bo", "password": PASSWORD}),
]
"""In this order: each form of the console, the page that it stands on (empty: the same), and its fields."""
COMMANDS: list[tuple[str, str]] = [
    ("tenant create", "acme"),
    ("tenant set", "acme --weight 2"),
    ("tenant suspend", "acme"),
    ("tenant resume", "acme"),
    ("project create", "search --tenant acme"),
    ("project suspend", "search --tenant acme"),
    ("project resume", "search --tenant acme"),
    ("key create", "--tenant acme"),
    ("key set", "{key} --name web"),
    ("key rotate", "{key}"),
    ("key revoke", "{key}"),
    ("limit set", "--tenant acme --meter requests --window day --amount 5"),
    ("limit override", "{limit} --amount 9 --for 1h --reason launch"),
    ("limit remove", "{limit}"),
    ("slo set", "--tier standard --metric ttft --target 2"),
    ("slo remove", "{slo}"),
    ("brake", "--tier batch --share 0.5 --for 1h"),
    ("alias set", "big my-model"),
    ("alias remove", "big"),
    ("price set", "other --free"),
    ("person invite", "bo --role auditor"),
    ("person role", "bo operator"),
    ("person suspend", "bo"),
    ("person resume", "bo"),
    ("person reset", "bo"),
    ("person end-session", "--all-of bo"),
    ("person erase", "bo"),
    ("webhook add", RECEIVER),
    ("webhook test", "{webhook}"),
    ("webhook resend", "{webhook}"),
    ("webhook remove", "{webhook}"),
    ("usage rebuild", ""),
    ("apply", "-f {file}"),
]
"""In this order: each command that changes the database, and its words."""
THROUGH_A_SERVER = (
    *("alerts acknowledge", "alerts silence", "alerts unsilence"),
    *("request cancel", "request move", "ledger adjust", "policy set", "upstream drain", "upstream resume"),
)
"""Commands that call a route of the running server: the row is the route's. Those of alerts need one that
fires: the row is the form's."""


def test_every_form_and_command_is_called_here_or_has_its_test_elsewhere() -> None:
    told = {f"{method} {path}" for method, path in routes() if method not in ("GET", "HEAD", "OPTIONS")}
    of_console = {each for each in told if " /console/" in each}
    elsewhere = set(ELSEWHERE) | set(NO_ACT)
    special = {"POST /console/set-up"}
    assert {
        f"POST {path.replace('{platform_limit}', '{limit}')}" for path, *_ in FORMS
    } | special == of_console - elsewhere
    changes = {name for name, used in ROUTES.items() if any(_is_act(route) for route in used)}
    assert {name for name, _ in COMMANDS} == changes - set(THROUGH_A_SERVER)
    assert elsewhere <= told
    for where in ELSEWHERE.values():
        file, _, test = where.partition("::")
        assert f"def {test}(" in (REPO / file).read_text(), where


def _is_act(route: str) -> bool:
    method, _, path = route.partition(" ")
    return RULES.get((method, path)) == "admin:write"  # pages have no rule there


PRIVATE = {"FAIRGATE_GATEWAY_WEBHOOK_PRIVATE": "yes"}


@dataclass
class AuditedApp:
    """The gateway in this process, and the audit of its database."""

    client: httpx.AsyncClient
    app: Litestar
    url: str
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = create_engine(self.url)

    async def rows(self) -> list[str]:
        """The act of each row, with those that wait to be written."""
        await self.app.state["gateway"].accesses.close()
        with self.engine.connect() as connection:
            columns = tables.audit.c
            return list(connection.execute(select(columns.action).order_by(columns.seq)).scalars())

    def path(self, template: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda found: self.names[found[1]], template)


@pytest.fixture
async def audited_app(sqlite_url: str, tmp_path: Path) -> AsyncIterator[AuditedApp]:
    async with gateway_and_app(sqlite_url, tmp_path, webhook_private="yes") as (client, app):
        made = AuditedApp(client, app, sqlite_url)
        database = open_database(sqlite_url)
        admin = Admin(Transactions(database, PEPPER, webhook_private=True))
        await admin.tenants.create(ROOT, TenantCreate(name="acme"))
        key, _ = await admin.keys.create(ROOT, KeyCreate(tenant="acme"))
        hourly = LimitSet(tenant="acme", meter="requests", window="hour", amount=5)
        limit = await admin.limits.set(ROOT, hourly)
        platform = await admin.limits.set(
            ROOT, LimitSet(platform=True, meter="requests", window="hour", amount=5)
        )
        slo = await admin.slos.set(ROOT, SloSet(tier="batch", metric="ttft", target_s=9.0))
        webhook, _ = await admin.webhooks.add(ROOT, WebhookAdd(url=RECEIVER))
        for name in ("ada", "bo", "cy"):
            _, token = await admin.people.invite(ROOT, PersonInvite(name=name, role="owner"))
            await admin.people.redeem_link(Actor(LINK, "192.0.2.1"), token, HASH)
        made.names = {
            "tenant": "acme",
            "project": key.project_id,
            "key": key.key_id,
            "limit": limit.limit_id,
            "platform_limit": platform.limit_id,
            "slo": slo.id,
            "webhook": webhook.webhook_id,
            "person": "cy",
            "replica": "away",
        }
        async with Browser(app) as other:
            assert (await other.log_in("ada")).status_code == 303
        [session] = await admin.person_sessions.all("ada")
        made.names["session"] = session.session_id
        await database.close()
        yield made
        made.engine.dispose()


async def test_every_form_of_the_console_leaves_one_row(audited_app: AuditedApp) -> None:
    async with Browser(audited_app.app) as browser:
        assert (await browser.log_in("ada")).status_code == 303
        before = await audited_app.rows()
        for template, page, fields in FORMS:
            is_on_one = "{reference}" in template  # which stands in the page's own address
            path = audited_app.path(page if is_on_one else template)
            stands_on = audited_app.path(page) if page else path
            typed = {name: audited_app.path(value) for name, value in fields.items()}
            tags = re.findall(r'name="etag" value="([^"]+)"', (await browser.get(stands_on)).text)
            answer = await browser.send(stands_on, path, **({"etag": tags[0]} if tags else {}), **typed)
            assert answer.status_code in (200, 303), f"{template}: {answer.status_code} {answer.text}"
            after = await audited_app.rows()
            assert len(after) == len(before) + 1, f"{template}: {after[len(before) :]}"
            before = after
        invited = await audited_app.client.post("/admin/v1/people", json={"name": "dee", "role": "auditor"})
        before = await audited_app.rows()
        async with Browser(audited_app.app) as new:
            assert (await new.redeem(invited.json()["link"].partition("token=")[2])).status_code == 303
        assert (await audited_app.rows())[len(before) :] == ["person.redeem"]


def test_every_command_leaves_one_row(sqlite_url: str, tmp_path: Path) -> None:
    (tmp_path / "fairgate.yaml").write_text("version: 1\ntenants:\n- {name: acme, weight: 7}\n")
    names = {"file": str(tmp_path / "fairgate.yaml")}
    engine = create_engine(sqlite_url)

    def rows() -> list[str]:
        with engine.connect() as connection:
            return list(
                connection.execute(select(tables.audit.c.action).order_by(tables.audit.c.seq)).scalars()
            )

    before = rows()
    for name, words in COMMANDS:
        given = [re.sub(r"\{(\w+)\}", lambda found: names[found[1]], each) for each in words.split()]
        line = [*name.split(), *given, "--data-dir", str(tmp_path), "--json"]
        result = CliRunner().invoke(cli, line, prog_name="fairgate", env=PRIVATE)
        assert result.exit_code == 0, f"{name}: {result.output}"
        after = rows()
        assert len(after) == len(before) + 1, f"{name}: {after[len(before) :]}"
        before = after
        told = json.loads(result.stdout)
        kind = name.split()[0]
        if name in ("key create", "limit set", "slo set", "webhook add"):
            names[kind] = told["id"]
    engine.dispose()
