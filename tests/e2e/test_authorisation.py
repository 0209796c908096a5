"""Every route with every kind of key. Every route that there is, with every kind of key.

What is right stands here, written by hand; which routes there are, the application says. A new route without
a line here fails the first test.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tenants.types import SCOPES
from tests.support.documents import routes
from tests.support.server_process import MODEL, Server

PUBLIC = ""
RULES: dict[tuple[str, str], str] = {
    ("GET", "/"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
    ("GET", "/docs"): PUBLIC,
    ("GET", "/docs/openapi.json"): PUBLIC,
    ("GET", "/healthz"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/metrics"): PUBLIC,
    ("POST", "/v1/chat/completions"): "inference",
    ("POST", "/v1/completions"): "inference",
    ("GET", "/v1/models"): "inference",
    ("GET", "/v1/models/{model_id}"): "inference",
    ("POST", "/v1/quotes"): "quote",
    ("GET", "/v1/limits"): "usage:read",
    ("GET", "/v1/requests"): "inference",
    ("GET", "/v1/requests/{request_id}"): "inference",
    ("DELETE", "/v1/requests/{request_id}"): "inference",
    ("POST", "/v1/requests/{request_id}/tier"): "inference",
    ("DELETE", "/admin/v1/requests/{request_id}"): "admin:write",
    ("POST", "/admin/v1/requests/{request_id}/tier"): "admin:write",
    ("GET", "/admin/v1/requests"): "admin:read",
    ("GET", "/admin/v1/audit"): "admin:read",
    ("GET", "/admin/v1/projects"): "admin:read",
    ("POST", "/admin/v1/projects"): "admin:write",
    ("POST", "/admin/v1/projects/{project}/suspend"): "admin:write",
    ("POST", "/admin/v1/projects/{project}/resume"): "admin:write",
    ("GET", "/admin/v1/status"): "admin:read",
    ("GET", "/admin/v1/dispatch-log"): "admin:read",
    ("GET", "/admin/v1/forecasts"): "admin:read",
    ("POST", "/admin/v1/ledger/verify"): "admin:read",
    ("GET", "/admin/v1/policy"): "admin:read",
    ("POST", "/admin/v1/policy"): "admin:write",
    ("GET", "/admin/v1/tenants"): "admin:read",
    ("POST", "/admin/v1/tenants"): "admin:write",
    ("GET", "/admin/v1/tenants/{tenant}"): "admin:read",
    ("PATCH", "/admin/v1/tenants/{tenant}"): "admin:write",
    ("POST", "/admin/v1/tenants/{tenant}/suspend"): "admin:write",
    ("POST", "/admin/v1/tenants/{tenant}/resume"): "admin:write",
    ("GET", "/admin/v1/keys"): "admin:read",
    ("POST", "/admin/v1/keys"): "admin:write",
    ("PATCH", "/admin/v1/keys/{key}"): "admin:write",
    ("POST", "/admin/v1/keys/{key}/rotate"): "admin:write",
    ("DELETE", "/admin/v1/keys/{key}"): "admin:write",
    ("GET", "/admin/v1/limits"): "admin:read",
    ("POST", "/admin/v1/limits"): "admin:write",
    ("GET", "/admin/v1/limits/{limit}"): "admin:read",
    ("DELETE", "/admin/v1/limits/{limit}"): "admin:write",
    ("POST", "/admin/v1/limits/{limit}/override"): "admin:write",
    ("DELETE", "/admin/v1/limits/{limit}/override"): "admin:write",
    ("GET", "/admin/v1/brake"): "admin:read",
    ("PUT", "/admin/v1/brake"): "admin:write",
    ("DELETE", "/admin/v1/brake"): "admin:write",
    ("GET", "/admin/v1/prices"): "admin:read",
    ("POST", "/admin/v1/prices"): "admin:write",
    ("GET", "/admin/v1/prices/history"): "admin:read",
    ("GET", "/admin/v1/requests/{request_id}"): "admin:read",
    ("GET", "/admin/v1/slos"): "admin:read",
    ("POST", "/admin/v1/slos"): "admin:write",
    ("DELETE", "/admin/v1/slos/{slo}"): "admin:write",
    ("GET", "/admin/v1/slo/report"): "admin:read",
    ("GET", "/admin/v1/slo/misses"): "admin:read",
}
"""The scope that each route needs."""
OF_ONE_TENANT = "/v1/"
"""Below this a key sees its own tenant's things only."""
REFUSED = {
    "no key": (None, "invalid_api_key"),
    "no bearer": ("Basic abc", "invalid_api_key"),
    "malformed": ("Bearer nonsense", "invalid_api_key"),
    "unknown": ("Bearer fg_live_0000000000000000_0000", "invalid_api_key"),
}


def call(server: Server, method: str, path: str, authorization: str | None) -> httpx.Response:
    """With names of what does not exist, and a body that says nothing: who may call it gets no further."""
    headers = {} if authorization is None else {"authorization": authorization}
    for name in ("model_id", "request_id", "tenant", "key", "limit", "slo"):
        path = path.replace(f"{{{name}}}", "nobody-has-this")
    body: Any = {} if method in ("POST", "PATCH", "PUT") else None
    return httpx.request(method, server.url + path, headers=headers, json=body, timeout=60)


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
    server.admin("DELETE", f"/keys/{revoked['id']}")
    server.admin("POST", "/tenants", {"name": "matrix-suspended"})
    suspended = server.admin("POST", "/keys", {"tenant": "matrix-suspended", "scopes": every})
    server.admin("POST", "/tenants/matrix-suspended/suspend")
    return made | {"revoked": revoked["key"], "suspended": suspended["key"]}


def test_every_route_has_a_rule_and_every_rule_a_route() -> None:
    # The framework adds its own pages, which hold what /openapi.json says.
    assert routes() | {("GET", "/docs"), ("GET", "/docs/openapi.json")} == set(RULES)


@pytest.mark.parametrize(("method", "path"), sorted(RULES))
def test_a_route_opens_for_its_scope_and_for_no_other_key(
    server: Server, keys: dict[str, str], method: str, path: str
) -> None:
    rule = RULES[method, path]
    if rule == PUBLIC:
        assert call(server, method, path, None).status_code == 200
        return
    for name, (authorization, code) in REFUSED.items():
        answer = call(server, method, path, authorization)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, code), name
        assert answer.headers["www-authenticate"] == "Bearer"
    for name, status in (("revoked", 401), ("suspended", 403)):
        assert call(server, method, path, f"Bearer {keys[name]}").status_code == status, name
    for scope in sorted(SCOPES):
        answer = call(server, method, path, f"Bearer {keys[scope]}")
        if scope == rule:
            assert answer.status_code not in (401, 403), answer.text
            assert answer.status_code < 500, answer.text
        else:
            assert answer.status_code == 403, f"{scope}: {answer.text}"
            assert answer.json()["error"]["code"] == "insufficient_permissions"


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
    there, none = ({**answer.json()["error"], "message": ""} for answer in answers)
    assert there == none
    assert set(answers[0].headers) == set(answers[1].headers)
