"""A member who names things of another tenant in forms of the own one: to the member they are not there."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.e2e.test_authorisation import PAGES
from tests.e2e.test_crash import start_streams
from tests.support.people import logged_in
from tests.support.server_process import Server

pytestmark = pytest.mark.attack

OWN, FOREIGN = "foreign-ids-own", "foreign-ids-other"
FIELDS = {
    "now": "yes", "confirm": "yes", "amount": "1", "meter": "requests", "window": "day", "mode": "hard",
    "weight": "9", "tier": "batch", "grace_s": "0", "if_match": "*", "etag": "*", "name": "taken-over",
}  # fmt: skip
"""So that no form is refused for what it lacks."""
POSTED = sorted(
    path
    for method, path in PAGES
    if method == "POST" and re.search(r"\{(key|limit|project|request_id)\}", path)
)


@pytest.fixture(scope="module")
def foreign(server: Server) -> Iterator[dict[str, str]]:
    """Names of another tenant's things, one of them a request that runs."""
    server.admin("POST", "/tenants", {"name": OWN})
    server.admin("POST", "/tenants", {"name": FOREIGN})
    key = server.admin("POST", "/keys", {"tenant": FOREIGN})
    limit = server.limit(FOREIGN, "output_tokens", 40, rate_per_s=40)
    server.admin("POST", "/projects", {"tenant": FOREIGN, "name": "secret-plans"})
    [stream] = start_streams(server, key["key"], 1, 400)
    assert stream.has_tokens.wait(60)
    yield {"key": key["id"], "limit": limit, "project": "secret-plans", "request_id": stream.request_id}
    server.limit(FOREIGN, "output_tokens", 1_000_000, rate_per_s=1_000_000)
    stream.join(60)
    assert stream.saw_done, "the request was left alone"


def plain(page: str) -> str:
    """A page without what each answer has for itself."""
    return re.sub(r"(req|key|lim)_\w+|secret-p?l?a?n?s?0*|value=\"[^\"]*\"", "", page)


def state(server: Server) -> list[object]:
    """All that the forms could have changed, and every act."""
    lists = [server.admin("GET", f"/{kind}?tenant={FOREIGN}")["data"] for kind in ("keys", "projects")]
    limits = server.admin("GET", f"/limits?tenant={FOREIGN}")["data"]
    acts = server.admin("GET", "/audit?limit=1")["data"][0]["seq"]
    return [*lists, [{**each, "usage": None} for each in limits], acts]


async def test_a_form_of_the_own_tenant_does_not_reach_another_tenants_things(
    server: Server, foreign: dict[str, str]
) -> None:
    assert len(POSTED) >= 9, POSTED
    async with logged_in(server, "member", OWN) as browser:
        token = await browser.token("/console/password")
        before = state(server)
        unknown = {name: f"{value[:-4]}0000" for name, value in foreign.items()}
        for path in POSTED:
            for names in (foreign | {"tenant": OWN}, foreign | {"tenant": FOREIGN}):
                there, nothing = path.format_map(names), path.format_map(names | unknown)
                found = await browser.http.post(there, data=FIELDS | {"form_token": token})
                # Acts on projects and on the platform are not for members; one on an ended request says so.
                is_for_others = "{project}" in path or path.startswith("/console/limits")
                role = 403 if is_for_others else 200 if "{request_id}" in path else 404
                assert found.status_code == role, there
                none = await browser.http.post(nothing, data=FIELDS | {"form_token": token})
                assert plain(found.text) == plain(none.text), "as if there were none"
        assert state(server) == before
