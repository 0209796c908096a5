"""Every route of the API with every kind of key, every page of the console with every role, and each of them
with what opens the other.

What is right stands here, written by hand; which routes and pages there are, the application says. A new one
without a line here fails the first test.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from functools import cache
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.console import assets
from tenants.types import SCOPES
from tests.support.console import Browser
from tests.support.documents import routes
from tests.support.server_process import MODEL, Server

PUBLIC = ""
RULES: dict[tuple[str, str], str] = {
    ("GET", "/"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
    ("GET", "/docs"): PUBLIC,
    ("GET", "/healthz"): PUBLIC,
    ("GET", "/health"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/metrics"): PUBLIC,
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/v1/completions"): "inference",
    ("POST", "/v1/responses"): "inference",
    ("POST", "/v1/messages"): "inference",
    ("POST", "/v1/messages/count_tokens"): "inference",
    ("POST", "/v1/embeddings"): "inference",
    ("POST", "/v1/rerank"): "inference",
    ("POST", "/tokenize"): "inference",
    ("POST", "/v1/tokenize"): "inference",
    ("POST", "/detokenize"): "inference",
    ("POST", "/v1/detokenize"): "inference",
    ("GET", "/v1/models"): "inference",
    ("GET", "/v1/models/{model_id}"): "inference",
    ("POST", "/v1/quotes"): "quote",
    ("GET", "/v1/limits"): "usage:read",
    ("GET", "/v1/usage"): "usage:read",
    ("GET", "/v1/refusals"): "usage:read",
    ("GET", "/v1/sessions"): "usage:read",
    ("GET", "/v1/sessions/{session}"): "usage:read",
    ("GET", "/admin/v1/tenants/{tenant}/sessions"): "admin:read",
    ("GET", "/v1/requests"): "inference",
    ("GET", "/v1/requests/{request_id}"): "inference",
    ("DELETE", "/v1/requests/{request_id}"): "inference",
    ("POST", "/v1/requests/{request_id}/tier"): "inference",
    ("DELETE", "/admin/v1/requests/{request_id}"): "admin:write",
    ("POST", "/admin/v1/requests/{request_id}/tier"): "admin:write",
    ("GET", "/admin/v1/requests"): "admin:read",
    ("GET", "/admin/v1/requests/ended"): "admin:read",
    ("GET", "/admin/v1/refusals"): "admin:read",
    ("GET", "/admin/v1/refusals/counts"): "admin:read",
    ("GET", "/admin/v1/calibration"): "admin:read",
    ("GET", "/admin/v1/audit"): "admin:read",
    ("GET", "/admin/v1/audit/log"): "admin:read",
    ("GET", "/admin/v1/audit/entries"): "admin:read",
    ("GET", "/admin/v1/audit/checkpoints"): "admin:read",
    ("GET", "/admin/v1/audit/consistency"): "admin:read",
    ("GET", "/admin/v1/audit/proof"): "admin:read",
    ("GET", "/admin/v1/projects"): "admin:read",
    ("POST", "/admin/v1/projects"): "admin:write",
    ("GET", "/admin/v1/projects/{project}"): "admin:read",
    ("POST", "/admin/v1/projects/{project}/suspend"): "admin:write",
    ("POST", "/admin/v1/projects/{project}/resume"): "admin:write",
    ("GET", "/admin/v1/status"): "admin:read",
    ("GET", "/admin/v1/dispatch-log"): "admin:read",
    ("GET", "/admin/v1/forecasts"): "admin:read",
    ("GET", "/admin/v1/ledger/{request_id}"): "admin:read",
    ("POST", "/admin/v1/ledger/verify"): "admin:read",
    ("POST", "/admin/v1/ledger/adjust"): "admin:write",
    ("GET", "/admin/v1/usage"): "admin:read",
    ("GET", "/admin/v1/usage/export"): "admin:read",
    ("POST", "/admin/v1/usage/verify"): "admin:read",
    ("POST", "/admin/v1/usage/rebuild"): "admin:write",
    ("GET", "/admin/v1/policy"): "admin:read",
    ("POST", "/admin/v1/policy"): "admin:write",
    ("GET", "/admin/v1/policy/moves"): "admin:read",
    ("GET", "/admin/v1/tenants"): "admin:read",
    ("POST", "/admin/v1/tenants"): "admin:write",
    ("GET", "/admin/v1/tenants/{tenant}"): "admin:read",
    ("PATCH", "/admin/v1/tenants/{tenant}"): "admin:write",
    ("POST", "/admin/v1/tenants/{tenant}/suspend"): "admin:write",
    ("POST", "/admin/v1/tenants/{tenant}/resume"): "admin:write",
    ("GET", "/admin/v1/keys"): "admin:read",
    ("POST", "/admin/v1/keys"): "admin:write",
    ("GET", "/admin/v1/keys/{key}"): "admin:read",
    ("PATCH", "/admin/v1/keys/{key}"): "admin:write",
    ("POST", "/admin/v1/keys/{key}/rotate"): "admin:write",
    ("DELETE", "/admin/v1/keys/{key}"): "admin:write",
    ("GET", "/admin/v1/limits"): "admin:read",
    ("POST", "/admin/v1/limits"): "admin:write",
    ("GET", "/admin/v1/limits/{limit}"): "admin:read",
    ("DELETE", "/admin/v1/limits/{limit}"): "admin:write",
    ("POST", "/admin/v1/limits/{limit}/override"): "admin:write",
    ("DELETE", "/admin/v1/limits/{limit}/override"): "admin:write",
    ("GET", "/admin/v1/config"): "admin:read",
    ("POST", "/admin/v1/config/plan"): "admin:read",
    ("POST", "/admin/v1/config/apply"): "admin:write",
    ("GET", "/admin/v1/brake"): "admin:read",
    ("PUT", "/admin/v1/brake"): "admin:write",
    ("DELETE", "/admin/v1/brake"): "admin:write",
    ("GET", "/admin/v1/upstreams"): "admin:read",
    ("GET", "/admin/v1/upstreams/{replica}/drain"): "admin:read",
    ("POST", "/admin/v1/upstreams/{replica}/drain"): "admin:write",
    ("POST", "/admin/v1/upstreams/{replica}/resume"): "admin:write",
    ("GET", "/admin/v1/aliases"): "admin:read",
    ("GET", "/admin/v1/aliases/stored"): "admin:read",
    ("POST", "/admin/v1/aliases/stored"): "admin:write",
    ("GET", "/admin/v1/aliases/stored/{alias}"): "admin:read",
    ("DELETE", "/admin/v1/aliases/stored/{alias}"): "admin:write",
    ("GET", "/admin/v1/tiers"): "admin:read",
    ("GET", "/admin/v1/prices"): "admin:read",
    ("POST", "/admin/v1/prices"): "admin:write",
    ("GET", "/admin/v1/prices/history"): "admin:read",
    ("GET", "/admin/v1/requests/{request_id}"): "admin:read",
    ("GET", "/admin/v1/slos"): "admin:read",
    ("POST", "/admin/v1/slos"): "admin:write",
    ("GET", "/admin/v1/slos/{slo}"): "admin:read",
    ("DELETE", "/admin/v1/slos/{slo}"): "admin:write",
    ("GET", "/admin/v1/slo/report"): "admin:read",
    ("GET", "/admin/v1/slo/misses"): "admin:read",
    ("GET", "/admin/v1/flow"): "admin:read",
    ("GET", "/admin/v1/engines"): "admin:read",
    ("GET", "/admin/v1/alerts"): "admin:read",
    ("GET", "/admin/v1/alerts/{alert}"): "admin:read",
    ("POST", "/admin/v1/alerts/{alert}/acknowledge"): "admin:write",
    ("POST", "/admin/v1/alerts/{alert}/silence"): "admin:write",
    ("DELETE", "/admin/v1/alerts/{alert}/silence"): "admin:write",
    ("GET", "/admin/v1/webhooks"): "admin:read",
    ("POST", "/admin/v1/webhooks"): "admin:write",
    ("GET", "/admin/v1/webhooks/{webhook}"): "admin:read",
    ("DELETE", "/admin/v1/webhooks/{webhook}"): "admin:write",
    ("POST", "/admin/v1/webhooks/{webhook}/test"): "admin:write",
    ("GET", "/admin/v1/webhooks/{webhook}/deliveries"): "admin:read",
    ("POST", "/admin/v1/webhooks/{webhook}/resend"): "admin:write",
    ("GET", "/admin/v1/people"): "admin:read",
    ("POST", "/admin/v1/people"): "admin:write",
    ("GET", "/admin/v1/people/{person}"): "admin:read",
    ("PATCH", "/admin/v1/people/{person}"): "admin:write",
    ("DELETE", "/admin/v1/people/{person}"): "admin:write",
    ("POST", "/admin/v1/people/{person}/suspend"): "admin:write",
    ("POST", "/admin/v1/people/{person}/resume"): "admin:write",
    ("POST", "/admin/v1/people/{person}/reset"): "admin:write",
    ("DELETE", "/admin/v1/people/{person}/sessions"): "admin:write",
    ("GET", "/admin/v1/sessions"): "admin:read",
    ("DELETE", "/admin/v1/sessions/{session}"): "admin:write",
}
"""The scope that each route needs."""
RULES |= {("HEAD", path): rule for (method, path), rule in RULES.items() if method == "GET"}
ROLES = ("owner", "operator", "auditor", "member", "member elsewhere")
"""Whose sessions there are; the last one is a member of another tenant."""
READ_PEOPLE = ("owner", "auditor")
CHANGE_PEOPLE = ("owner",)
CHANGE_TENANTS = ("owner", "operator")
MAKE_KEYS = ("owner", "member", "member elsewhere")
REVOKE_KEYS = LIMIT_BELOW = CHANGE_WEBHOOKS = ("owner", "operator", "member", "member elsewhere")
"""A member may, in the own tenants; of other tenants' pages there are none for a member (`NOT_THERE`)."""
READ_PLATFORM = ("owner", "operator", "auditor")
WITHOUT_STRANGERS = (*READ_PLATFORM, "member")
"""Of a page of one thing of a tenant: to members of others it does not exist."""
CHANGE_PLATFORM = ("owner", "operator")
STEER = ("owner", "operator", "member", "member elsewhere")
PAGES: dict[tuple[str, str], tuple[str, ...] | None] = {
    ("GET", "/console/assets/{name}"): None,
    ("GET", "/runbooks/{subject}"): None,
    ("GET", "/console/set-up"): None,
    ("POST", "/console/set-up"): None,
    ("GET", "/console/log-in"): None,
    ("POST", "/console/log-in"): None,
    ("POST", "/console/log-out"): ROLES,
    ("GET", "/console"): ROLES,
    ("GET", "/console/search"): ROLES,
    ("GET", "/console/password"): ROLES,
    ("POST", "/console/password"): ROLES,
    ("GET", "/console/sessions"): ROLES,
    ("POST", "/console/sessions/end"): ROLES,
    ("GET", "/console/streams"): None,
    ("GET", "/console/overview"): ROLES,
    ("GET", "/console/live"): ROLES,
    ("GET", "/console/waiting"): ROLES,
    ("GET", "/console/waiting/live"): ROLES,
    ("GET", "/console/waiting/{request_id}/cancel"): STEER,
    ("POST", "/console/waiting/{request_id}/cancel"): STEER,
    ("GET", "/console/waiting/{request_id}/move"): STEER,
    ("POST", "/console/waiting/{request_id}/move"): STEER,
    ("GET", "/console/people"): READ_PEOPLE,
    ("POST", "/console/people/invite"): CHANGE_PEOPLE,
    ("GET", "/console/people/{person}"): READ_PEOPLE,
    ("POST", "/console/people/{person}"): CHANGE_PEOPLE,
    ("GET", "/console/tenants"): ROLES,
    ("POST", "/console/tenants"): CHANGE_TENANTS,
    ("GET", "/console/tenants/{tenant}"): ROLES,
    ("GET", "/console/tenants/{tenant}/change"): CHANGE_TENANTS,
    ("POST", "/console/tenants/{tenant}/change"): CHANGE_TENANTS,
    ("GET", "/console/tenants/{tenant}/suspend"): CHANGE_TENANTS,
    ("POST", "/console/tenants/{tenant}/suspend"): CHANGE_TENANTS,
    ("POST", "/console/tenants/{tenant}/resume"): CHANGE_TENANTS,
    ("GET", "/console/tenants/{tenant}/projects"): ROLES,
    ("POST", "/console/tenants/{tenant}/projects"): CHANGE_TENANTS,
    ("GET", "/console/tenants/{tenant}/projects/{project}/suspend"): CHANGE_TENANTS,
    ("POST", "/console/tenants/{tenant}/projects/{project}/suspend"): CHANGE_TENANTS,
    ("POST", "/console/tenants/{tenant}/projects/{project}/resume"): CHANGE_TENANTS,
    ("GET", "/console/tenants/{tenant}/keys"): ROLES,
    ("POST", "/console/tenants/{tenant}/keys"): MAKE_KEYS,
    ("GET", "/console/tenants/{tenant}/keys/{key}"): ROLES,
    ("POST", "/console/tenants/{tenant}/keys/{key}/rotate"): MAKE_KEYS,
    ("GET", "/console/tenants/{tenant}/keys/{key}/change"): REVOKE_KEYS,
    ("POST", "/console/tenants/{tenant}/keys/{key}/change"): REVOKE_KEYS,
    ("GET", "/console/tenants/{tenant}/keys/{key}/revoke"): REVOKE_KEYS,
    ("POST", "/console/tenants/{tenant}/keys/{key}/revoke"): REVOKE_KEYS,
    ("GET", "/console/tenants/{tenant}/limits"): ROLES,
    ("POST", "/console/tenants/{tenant}/limits"): LIMIT_BELOW,
    ("GET", "/console/tenants/{tenant}/limits/{limit}"): ROLES,
    ("POST", "/console/tenants/{tenant}/limits/{limit}"): LIMIT_BELOW,
    ("GET", "/console/tenants/{tenant}/limits/{limit}/remove"): LIMIT_BELOW,
    ("POST", "/console/tenants/{tenant}/limits/{limit}/remove"): LIMIT_BELOW,
    ("GET", "/console/keys"): ROLES,
    ("GET", "/console/requests"): ROLES,
    ("GET", "/console/requests/new"): ROLES,
    ("GET", "/console/requests/{request_id}"): WITHOUT_STRANGERS,
    ("GET", "/console/refusals"): ROLES,
    ("GET", "/console/refusals/new"): ROLES,
    ("GET", "/console/refusals.csv"): ROLES,
    ("GET", "/console/requests.csv"): ROLES,
    ("GET", "/console/tenants.csv"): ROLES,
    ("GET", "/console/keys.csv"): ROLES,
    ("GET", "/console/slo/misses/new"): ROLES,
    ("GET", "/console/slo/misses.csv"): ROLES,
    ("GET", "/console/slo"): ROLES,
    ("GET", "/console/slo/misses"): ROLES,
    ("GET", "/console/alerts"): ROLES,
    ("POST", "/console/alerts/webhooks"): CHANGE_WEBHOOKS,
    ("GET", "/console/alerts/webhooks/{webhook}"): ROLES,
    ("POST", "/console/alerts/webhooks/{webhook}"): CHANGE_WEBHOOKS,
    ("GET", "/console/alerts/webhooks/{webhook}/remove"): CHANGE_WEBHOOKS,
    ("POST", "/console/alerts/webhooks/{webhook}/remove"): CHANGE_WEBHOOKS,
    ("GET", "/console/quotes"): READ_PLATFORM,
    ("GET", "/console/usage"): ROLES,
    ("GET", "/console/usage/csv"): ROLES,
    ("GET", "/console/usage/json"): ROLES,
    ("GET", "/console/usage/check"): READ_PLATFORM,
    ("GET", "/console/usage/recovery"): READ_PLATFORM,
    ("GET", "/console/upstreams"): READ_PLATFORM,
    ("GET", "/console/upstreams/{replica}/drain"): CHANGE_PLATFORM,
    ("POST", "/console/upstreams/{replica}/drain"): CHANGE_PLATFORM,
    ("POST", "/console/upstreams/{replica}/resume"): CHANGE_PLATFORM,
    ("GET", "/console/audit"): READ_PLATFORM,
    ("GET", "/console/audit/verify"): READ_PLATFORM,
    ("GET", "/console/audit.csv"): READ_PLATFORM,
    ("GET", "/console/audit/new"): READ_PLATFORM,
    ("GET", "/console/settings"): READ_PLATFORM,
    ("GET", "/console/policy"): READ_PLATFORM,
    ("POST", "/console/policy/change"): CHANGE_PLATFORM,
    ("GET", "/console/policy/brake"): READ_PLATFORM,
    ("GET", "/console/slo/targets"): READ_PLATFORM,
    ("GET", "/console/aliases"): READ_PLATFORM,
    ("GET", "/console/prices"): READ_PLATFORM,
    ("GET", "/console/prices/history"): READ_PLATFORM,
    ("GET", "/console/limits"): READ_PLATFORM,
    ("POST", "/console/limits"): CHANGE_PLATFORM,
    ("GET", "/console/limits/{limit}"): READ_PLATFORM,
    ("POST", "/console/limits/{limit}"): CHANGE_PLATFORM,
    ("GET", "/console/limits/{limit}/remove"): CHANGE_PLATFORM,
    ("POST", "/console/limits/{limit}/remove"): CHANGE_PLATFORM,
    ("POST", "/console/policy/what-if"): CHANGE_PLATFORM,
    ("GET", "/console/policy/what-if/{run}"): READ_PLATFORM,
    ("GET", "/console/policy/what-if/{run}/report"): READ_PLATFORM,
    ("POST", "/console/policy/what-if/{run}/cancel"): CHANGE_PLATFORM,
    ("POST", "/console/policy/what-if/{run}/apply"): CHANGE_PLATFORM,
}
"""The roles that each page of the console is for; None: it needs no session."""
ACT_FORMS = (
    *(
        "policy/brake/set",
        "policy/brake/{reference}/end",
        "slo/targets/set",
        "slo/targets/{reference}/remove",
    ),
    *("aliases/set", "aliases/{reference}/remove", "prices/set"),
    *(f"alerts/{{reference}}/{act}" for act in ("acknowledge", "silence", "unsilence")),
)
PAGES |= {(method, f"/console/{path}"): CHANGE_PLATFORM for path in ACT_FORMS for method in ("GET", "POST")}
PAGES |= {("HEAD", path): rule for (method, path), rule in PAGES.items() if method == "GET"}
NOT_THERE = "member elsewhere"
"""Who is told of each page of the tenant `matrix`, and of its webhook, that there is none."""
OBJECTS: dict[str, str] = {
    "person": "matrix-0",
    "tenant": "matrix",
    "project": "default",
    "subject": "saturation",
}
"""What the names in a page's path stand for; the fixture adds a key, a limit and a webhook."""
OF_ONE_TENANT = "/v1/"
"""Below this a key sees its own tenant's things only."""
REFUSED = {
    "no key": (None, "invalid_api_key"),
    "no bearer": ("Basic abc", "invalid_api_key"),
    "malformed": ("Bearer nonsense", "invalid_api_key"),
    "unknown": ("Bearer fg_live_0000000000000000_0000", "invalid_api_key"),
}


def call(
    server: Server,
    method: str,
    path: str,
    authorization: str | None,
    cookies: Mapping[str, str] | None = None,
) -> Answer:
    """With names of what does not exist, and a body that says nothing: who may call it gets no further."""
    headers = {} if authorization is None else {"authorization": authorization}
    headers |= {"cookie": "; ".join(f"{name}={value}" for name, value in (cookies or {}).items())}
    path = re.sub(r"\{\w+\}", "nobody-has-this", path)
    if method not in ("POST", "PATCH", "PUT"):
        return asked(server, method, path, headers)
    return asked(server, method, path, headers | {"content-type": "application/json"}, b"{}")


@dataclass(frozen=True)
class Answer:
    """An answer, read to its end."""

    status_code: int
    headers: Message
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode()

    @property
    def code(self) -> str:
        """The error's code."""
        code: str = json.loads(self.content)["error"]["code"]
        return code


@cache
def _connection(server_url: str) -> HTTPConnection:
    """One for all requests: with an HTTP client their thousands take five times as long."""
    return HTTPConnection(urlsplit(server_url).netloc, timeout=60)


@pytest.fixture(scope="module", autouse=True)
def _closed(server: Server) -> Iterator[None]:
    yield
    _connection(server.url).close()


def _sent(server: Server, method: str, path: str, headers: dict[str, str], body: bytes | None) -> Answer:
    connection = _connection(server.url)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return Answer(response.status, response.headers, response.read())


def asked(
    server: Server, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> Answer:
    """What it answers; to HEAD it answers a GET's status and no body."""
    answer = _sent(server, method, path, headers, body)
    if method == "GET":
        head = _sent(server, "HEAD", path, headers, None)
        assert (head.status_code, head.content) == (answer.status_code, b""), path
        assert answer.status_code < 400 or int(head.headers["content-length"]) > 0, path
    return answer


@pytest.fixture(scope="module")
def keys(server: Server) -> dict[str, str]:
    """One key for each scope, and one that has been revoked, of a suspended tenant, and expired."""
    server.admin("POST", "/tenants", {"name": "matrix"})
    made = {
        scope: server.admin("POST", "/keys", {"tenant": "matrix", "scopes": [scope]})["key"]
        for scope in sorted(SCOPES)
    }
    every = sorted(SCOPES)
    revoked = server.admin("POST", "/keys", {"tenant": "matrix", "scopes": every})
    # One of the admin API is changed by owners alone.
    OBJECTS["key"] = server.admin("POST", "/keys", {"tenant": "matrix", "scopes": ["inference"]})["id"]
    limit = {"tenant": "matrix", "key": revoked["id"], "meter": "requests", "window": "day", "amount": 5}
    OBJECTS["limit"] = server.admin("POST", "/limits", limit)["id"]
    webhook = {"tenant": "matrix", "url": "https://1.1.1.1/hook", "subjects": ["limit.exhaustion"]}
    OBJECTS["webhook"] = server.admin("POST", "/webhooks", webhook)["id"]
    server.admin("DELETE", f"/keys/{revoked['id']}")
    server.admin("POST", "/tenants", {"name": "matrix-suspended"})
    suspended = server.admin("POST", "/keys", {"tenant": "matrix-suspended", "scopes": every})
    server.admin("POST", "/tenants/matrix-suspended/suspend")
    return made | {"revoked": revoked["key"], "suspended": suspended["key"]}


def without_head(rules: Mapping[tuple[str, str], Any]) -> list[tuple[str, str]]:
    """Methods and paths; HEAD is asked beside each GET."""
    return sorted((method, path) for method, path in rules if method != "HEAD")


def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    # The framework adds its own pages, which hold what /openapi.json says.
    assert routes() == set(RULES) | set(PAGES)


@pytest.mark.parametrize(("method", "path"), without_head(RULES))
def test_a_route_opens_for_its_scope_and_for_no_other_key_and_no_session(
    server: Server, keys: dict[str, str], sessions: dict[str, dict[str, str]], method: str, path: str
) -> None:
    rule = RULES[method, path]
    if rule == PUBLIC:
        assert call(server, method, path, None).status_code == 200
        return
    for name, (authorization, code) in REFUSED.items():
        answer = call(server, method, path, authorization)
        assert (answer.status_code, answer.code) == (401, code), name
        assert answer.headers["www-authenticate"] == "Bearer"
    for role, cookies in sessions.items():
        answer = call(server, method, path, None, cookies)
        assert (answer.status_code, answer.code) == (401, "invalid_api_key"), role
    for name, status in (("revoked", 401), ("suspended", 403)):
        assert call(server, method, path, f"Bearer {keys[name]}").status_code == status, name
    for scope in sorted(SCOPES):
        answer = call(server, method, path, f"Bearer {keys[scope]}")
        if scope == rule:
            assert answer.status_code not in (401, 403), answer.text
            assert answer.status_code < 500, answer.text
        else:
            assert answer.status_code == 403, f"{scope}: {answer.text}"
            assert answer.code == "insufficient_permissions"


@pytest.fixture(scope="module")
def sessions(server: Server, keys: dict[str, str]) -> dict[str, dict[str, str]]:
    """The cookies of one person of each role."""
    server.admin("POST", "/tenants", {"name": "matrix-elsewhere"})
    tenants = {"member": ["matrix"], "member elsewhere": ["matrix-elsewhere"]}

    async def log_in(number: int, role: str) -> dict[str, str]:
        body: dict[str, Any] = {"name": f"matrix-{number}", "role": role.partition(" ")[0]}
        if role in tenants:
            body["tenants"] = tenants[role]
        token = server.admin("POST", "/people", body)["link"].partition("token=")[2]
        async with Browser(server.url) as browser:
            assert (await browser.redeem(token)).status_code == 303
            return browser.cookies

    async def all_of_them() -> dict[str, dict[str, str]]:
        return {role: await log_in(number, role) for number, role in enumerate(ROLES)}

    return asyncio.run(all_of_them())


@cache
def replica_of(server_url: str, key: str) -> str:
    """The name of a replica that there is."""
    headers = {"authorization": f"Bearer {key}"}
    pools = httpx.get(f"{server_url}/admin/v1/upstreams", headers=headers).json()["data"]
    name: str = pools[0]["replicas"][0]["replica_id"]
    return name


def outcome(server: Server, method: str, path: str, **how: Any) -> str:
    """What a page does: `log in`, `not for this role`, `not there`, or `opened`. A form is sent without its
    token, which is looked at last."""
    path = path.replace("{name}", assets.address("console.css").rpartition("/")[2])
    # What-ifs, brakes, targets, alerts, limits of the platform: who may see one is told that there is none.
    is_gone = "{run}" in path or "{reference}" in path or path.startswith("/console/limits/{")
    is_gone |= path == "/console/set-up"
    path = path.replace("{replica}", replica_of(server.url, server.owner_key))
    path = path.replace("{request_id}", how.get("request_id", "req_unknown"))
    path = re.sub(r"\{(\w+)\}", lambda found: OBJECTS.get(found[1], "nobody-has-this"), path)
    headers = {"cookie": "; ".join(f"{name}={value}" for name, value in how.get("cookies", {}).items())}
    if "key" in how:
        headers["authorization"] = f"Bearer {how['key']}"
    if method == "POST":
        form = {"content-type": "application/x-www-form-urlencoded"}
        answer = asked(server, method, path, headers | form, b"name=x")
    else:
        answer = asked(server, method, path, headers)
    text = answer.text
    if answer.status_code == 303 and answer.headers["location"].startswith("/console/log-in"):
        return "log in"
    if answer.status_code == 401 and "Your session had ended, and nothing was done" in text:
        return "log in"
    if answer.status_code == 403 and "Your role does not allow this" in text:
        return "not for this role"
    if answer.status_code == 404 and "Page not found" in text and not is_gone:
        return "not there"
    if method == "POST":
        assert answer.status_code == 403, text
        assert "This form was not accepted" in text
    else:
        leads_on = path in ("/console/log-in", "/console/overview") and answer.status_code == 303
        assert leads_on or answer.status_code == (404 if is_gone else 200), (answer.status_code, text)
    return "opened"


@pytest.fixture(scope="module")
def request_id(server: Server, keys: dict[str, str]) -> str:
    """A request of the member's tenant."""
    with server.http(keys["inference"]) as client:
        answer = client.post("/v1/completions", json={"model": MODEL, "prompt": "ours", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


@pytest.mark.parametrize(("method", "path"), without_head(PAGES))
def test_a_page_opens_for_its_roles_and_for_no_key(
    server: Server,
    keys: dict[str, str],
    sessions: dict[str, dict[str, str]],
    request_id: str,
    method: str,
    path: str,
) -> None:
    rule = PAGES[method, path]
    without_session = "opened" if rule is None else "log in"
    assert outcome(server, method, path) == without_session
    assert outcome(server, method, path, cookies={"fairgate_session": "x" * 43}) == without_session
    for name in (*sorted(SCOPES), "revoked"):
        assert outcome(server, method, path, key=keys[name]) == without_session, name
        # A key in the place of a session is none.
        assert outcome(server, method, path, cookies={"fairgate_session": keys[name]}) == without_session
    assert outcome(server, method, path, key=server.owner_key) == without_session
    for role in ROLES:
        refused = "not there" if rule == WITHOUT_STRANGERS else "not for this role"
        expected = "opened" if rule is None or role in rule else refused
        is_theirs = "{tenant}" in path or "{webhook}" in path
        if role == NOT_THERE and expected == "opened" and is_theirs and method != "POST":
            expected = "not there"
        found = outcome(server, method, path, cookies=sessions[role], request_id=request_id)
        assert found == expected, role


@pytest.mark.parametrize("path", sorted({path for _, path in (*RULES, *PAGES)}))
def test_options_tells_the_methods_of_a_route_and_nothing_else(
    server: Server, keys: dict[str, str], path: str
) -> None:
    methods = {method for method, other in (*RULES, *PAGES) if other == path} | {"OPTIONS"}
    answers = [
        call(server, "OPTIONS", path, None),
        call(server, "OPTIONS", path, f"Bearer {keys['inference']}"),
    ]
    for answer in answers:
        assert (answer.status_code, answer.content) == (204, b"")
        assert set(answer.headers["allow"].split(", ")) == methods
    wrong = call(server, next(iter({"GET", "POST", "PUT", "DELETE"} - methods)), path, None)
    assert wrong.status_code == 405
    assert set(wrong.headers["allow"].split(", ")) == methods


@pytest.fixture(scope="module")
def victim(server: Server) -> str:
    """A request of one tenant that has ended, so that every gateway knows of it."""
    key = server.tenant("victim")
    with server.http(key) as client:
        answer = client.post("/v1/completions", json={"model": MODEL, "prompt": "mine", "max_tokens": 1})
    assert answer.status_code == 200
    return str(answer.headers["x-request-id"])


@pytest.mark.parametrize(
    ("method", "path"),
    sorted(
        (method, path) for method, path in RULES if path.startswith(OF_ONE_TENANT) and "{request_id}" in path
    ),
)
def test_a_foreign_tenant_cannot_tell_a_request_from_none(
    server: Server, victim: str, method: str, path: str
) -> None:
    key = server.tenant(f"foreign-{method}-{path.count('/')}")
    body = {"service_tier": "flex"} if method == "POST" else None
    with server.http(key) as client:
        answers = [
            client.request(method, path.replace("{request_id}", name), json=body)
            for name in (victim, "req_00000000000000000000000000")
        ]
    assert [answer.status_code for answer in answers] == [404, 404]
    if method != "HEAD":
        there, none = ({**answer.json()["error"], "message": ""} for answer in answers)
        assert there == none
    assert set(answers[0].headers) == set(answers[1].headers)
