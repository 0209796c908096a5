"""Pages of upstreams, audit and settings on a running server: what they show, to whom, and what they do."""

from __future__ import annotations

import csv
import io
import re

import httpx
import pytest

from tests.support.people import logged_in
from tests.support.server_process import MODEL, Server


def rows_of(answer: httpx.Response) -> list[list[str]]:
    assert answer.headers["content-type"].startswith("text/csv"), answer.text
    return list(csv.reader(io.StringIO(answer.text)))


async def test_a_drain_says_what_it_does_asks_once_and_is_undone(server: Server) -> None:
    replica = server.admin("GET", "/upstreams")["data"][0]["replicas"][0]["replica_id"]
    async with logged_in(server, "operator") as browser:
        page = await browser.get("/console/upstreams")
        assert page.status_code == 200
        assert MODEL in page.text
        assert "serving" in page.text
        asked = await browser.get(f"/console/upstreams/{replica}/drain")
        assert "No request runs there now." in asked.text
        assert f"No other replica serves {MODEL}" in asked.text
        assert server.admin("GET", "/upstreams")["data"][0]["replicas"][0]["state"] == "serving"
        long = await browser.send(f"/console/upstreams/{replica}/drain", reason="<x>" * 70)
        assert long.status_code == 422
        assert 'id="error-reason"' in long.text
        assert "in 1 to 200 characters" in long.text
        assert f'value="{"&lt;x&gt;" * 70}"' in long.text, "what was typed is there again"
        assert server.admin("GET", "/upstreams")["data"][0]["replicas"][0]["state"] == "serving"
        done = await browser.send(f"/console/upstreams/{replica}/drain", reason=" <b>driver</b> ")
        assert done.status_code == 303, done.text
        try:
            assert server.admin("GET", "/upstreams")["data"][0]["replicas"][0]["state"] == "drained"
            page = await browser.get(done.headers["location"])
            assert f"{replica} gets no new requests" in page.text
            assert re.search(r"by person:pages-operator-[\w-]+: &lt;b&gt;driver&lt;/b&gt;", page.text)
            back = await browser.send("/console/upstreams", f"/console/upstreams/{replica}/resume")
            assert back.status_code == 303, back.text
            assert server.admin("GET", "/upstreams")["data"][0]["replicas"][0]["state"] == "serving"
            again = await browser.send(
                "/console/upstreams/" + replica + "/drain", f"/console/upstreams/{replica}/resume"
            )
            assert again.status_code == 422
            assert "No such drain" in again.text
        finally:
            if server.admin("GET", "/upstreams")["data"][0]["replicas"][0]["drain"]:
                server.admin("POST", f"/upstreams/{replica}/resume")
        resumed, drained = server.admin("GET", "/audit?act=upstream&limit=2")["data"]
        assert (resumed["action"], drained["action"]) == ("upstream.resume", "upstream.drain")
        assert drained["after"]["reason"] == "<b>driver</b>"
        assert (await browser.get("/console/upstreams/no-such-replica/drain")).status_code == 404
    async with logged_in(server, "auditor") as browser:
        page = await browser.get("/console/upstreams")
        assert page.status_code == 200
        assert 'action="/console/upstreams' not in page.text
        assert "Drain…" not in page.text


async def test_the_audit_shows_changed_fields_and_is_whole_as_a_file(server: Server) -> None:
    server.admin("POST", "/tenants", {"name": "audit-page"})
    for weight in range(2, 63):
        server.admin("PATCH", "/tenants/audit-page", {"weight": weight})
    async with logged_in(server, "auditor") as browser:
        page = await browser.get("/console/audit?tenant=audit-page&act=tenant.update")
        assert page.status_code == 200, page.text
        assert '<code>weight</code>: <span class="diff-before">61.0</span> <span class="diff-after">62.0' in (
            page.text
        )
        assert page.text.count("<code>tenant.update</code>") == 50
        following = page.text.partition('class="more"')[2].partition('href="')[2].partition('"')[0]
        page = await browser.get(following.replace("&amp;", "&"))
        assert page.text.count("<code>tenant.update</code>") == 11
        [head, *rows] = rows_of(await browser.get("/console/audit.csv?tenant=audit-page&order=oldest"))
        told = server.admin("GET", "/audit?tenant=audit-page&order=oldest&limit=1000")["data"]
        assert [int(row[0]) for row in rows] == [each["seq"] for each in told]
        assert head[-2:] == ["before", "after"]
        assert '"weight":62.0' in rows[-1][-1]
        # What was typed is shown as text, and what is wrong stands beside its field.
        page = await browser.get("/console/audit?actor=<script>alert")
        assert "<script>alert" not in page.text
        assert "&lt;script&gt;" in page.text
        for asked, field in (
            ("from=yesterday", "from"),
            ("act=nonsense", "act"),
            ("tenant=none-such", "tenant"),
            ("from=2026-02-01&to=2026-01-01", "from"),
        ):
            for path in ("/console/audit", "/console/audit.csv"):
                page = await browser.get(f"{path}?{asked}")
                assert page.status_code == 400, page.text
                assert f'id="error-{field}"' in page.text
        page = await browser.get("/console/audit?cursor=nonsense")
        assert page.status_code == 400
        assert 'role="alert"' in page.text


async def test_settings_say_where_they_come_from_and_tell_no_secret(server: Server) -> None:
    pepper = (server.data_dir / "pepper").read_text().strip()
    async with logged_in(server, "auditor") as browser:
        page = await browser.get("/console/settings")
        assert page.status_code == 200
        assert str(server.data_dir) in page.text
        assert "flag --data-dir" in page.text
        assert pepper not in page.text
        assert server.owner_key not in page.text
        page = await browser.get("/console/settings?text=engine.threads&only=set")
        assert page.text.count("<tr>") == 2
        assert "flag --engine-threads" in page.text
        page = await browser.get("/console/settings?text=no-such-setting")
        assert "No such setting" in page.text


@pytest.mark.parametrize("path", ["/console/upstreams", "/console/audit", "/console/settings"])
async def test_a_member_sees_nothing_of_the_platform(server: Server, path: str) -> None:
    tenant = f"of-{path.rpartition('/')[2]}"
    server.admin("POST", "/tenants", {"name": tenant})
    async with logged_in(server, "member", tenant) as browser:
        assert (await browser.get(path)).status_code == 403
        assert f'href="{path}"' not in (await browser.get("/console")).text
