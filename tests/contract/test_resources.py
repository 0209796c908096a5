"""Every list and every act of the admin API, the tenants' own lists and the console's, by one set of rules.

What is particular to each stands in `tests/support/resource_table.py`.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tenants.resources import all as declared
from tests.support.documents import routes
from tests.support.query_plans import recorder
from tests.support.resource_site import KEYS, ResourceSite, resource_site, tenants_in, with_query
from tests.support.resource_table import ALL, NEITHER, RESOURCES, Resource
from tests.support.route_questions import documented_paths

pytestmark = pytest.mark.asyncio(loop_scope="module")
HOSTILE = "=1+1<script>alert(1)</script>\n\u202eabc"
STALE = '"0000000000000000"'
LISTS = [one for one in RESOURCES if one.path]
PAGED = [one for one in LISTS if one.is_paged]
PAGES = [one for one in RESOURCES if one.page]
CHANGED = [one for one in RESOURCES if one.make or one.acts]
DECLARED = {one.path for one in declared.RESOURCES}
"""Of the lists that are read from a declaration."""
NEW = map("new-{}".format, itertools.count(1))
NO_FILTERS = {
    *("cursor", "limit", "order", "sort", "window", "group_by", "time_zone", "label", "end_user", "finding"),
}
"""Parameters that do not say which rows there are; labels, which need requests that have some; and findings
of keys, which no field says."""
WIDENED = {
    "slos": ("tenant",),
    "ended requests": ("min_duration_s",),
    "misses": ("project", "key", "model"),
    "audit": ("seq",),
    **dict.fromkeys(("refusal counts", "calibration", "flow", "engine minutes", "usage"), ("from", "to")),
}
"""Filters that leave more: targets of all tenants bind one, and times are widened to whole windows; those
that no field of a row repeats, and one row by its number."""
CALLED_IN_CONSOLE = {"since": "from", "until": "to"}
LARGE = {"refusals": "refusals", "ended requests": "timelines", "audit": "audit"}
"""The tables of which a list reads at most a page at once."""


def for_each(resources: Iterable[Resource]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("resource", resources, ids=lambda one: one.name.replace(" ", "-"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    _sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ResourceSite]:
    async with resource_site(_sqlite_template, tmp_path_factory.mktemp("resources"), 30) as made:
        yield made


async def test_every_list_filter_and_act_of_the_application_is_in_the_table() -> None:
    known = {path: _parameters(one["get"]) for path, one in documented_paths().items() if "get" in one}
    lists = {f"/admin/v1{one.path.partition('?')[0]}": one for one in PAGED}
    own = {one.own.partition("?")[0] for one in PAGED if one.own != "/v1/limits"}
    assert {path for path, names in known.items() if "cursor" in names} == lists.keys() | own - {""}
    for path, one in lists.items():
        in_table = {*one.filters, *re.findall(r"[?&](\w+)=", one.path), *WIDENED.get(one.name, ())}
        assert known[path] - NO_FILTERS == in_table - NO_FILTERS, one.name
    acts = [act.call for one in CHANGED for act in (one.make, *one.acts) if act is not None]
    called = {call.partition("?")[0].replace(" ", " /admin/v1").replace("/away", "/{}") for call in acts}
    changes = {f"{method} {path}" for method, path in routes() if method not in ("GET", "HEAD", "OPTIONS")}
    assert _unnamed({*called, *NEITHER}) == _unnamed(call for call in changes if " /admin/" in call)


def _parameters(operation: dict[str, Any]) -> set[str]:
    return {one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"}


def _unnamed(calls: Iterable[str]) -> set[str]:
    return {re.sub(r"\{\w*\}", "{}", call) for call in calls}


@for_each(LISTS)
async def test_a_list_opens_for_its_scope_alone(site: ResourceSite, resource: Resource) -> None:
    for name, opens_for in ((resource.path, "reader"), (resource.own, "own")):
        for caller in KEYS if name else ():
            answer = await site.ask(name, f"{caller} of t1")
            assert answer.status_code == (200 if caller == opens_for else 403), f"{caller}: {answer.text}"


@for_each([one for one in LISTS if one.own])
async def test_a_tenants_own_list_has_its_rows_alone(site: ResourceSite, resource: Resource) -> None:
    rows = {tenant: await site.rows(resource.own, f"own of {tenant}") for tenant in ("t1", "t2")}
    assert all(rows.values())
    assert rows["t1"] != rows["t2"]
    for tenant, listed in rows.items():
        assert tenants_in(json.dumps(listed)) <= {tenant}
    _, cursor = await site.page(resource.own, "own of t1", limit=1)
    foreign = {"tenant": "t1", "key": "key_1", "project": "prj_1"} | ({"cursor": cursor} if cursor else {})
    for name, value in foreign.items():
        answer = await site.ask(resource.own, "own of t2", **{name: value})
        assert answer.status_code != 200 or tenants_in(answer.text) <= {"t2"}, f"{name}: {answer.text}"


@for_each(PAGED)
async def test_pages_of_two_have_each_row_once_and_in_order(site: ResourceSite, resource: Resource) -> None:
    for path, caller in ((resource.path, ""), (resource.own, "own of t1")):
        whole = await site.rows(path, caller) if path else []
        assert len({json.dumps(row) for row in whole}) == len(whole) >= (3 if path == resource.path else 0)
        walked, cursor = await site.page(path, caller, limit=2) if path else ([], None)
        while cursor is not None:
            rows, cursor = await site.page(path, caller, limit=2, cursor=cursor)
            assert len(rows) <= 2
            walked += rows
        assert (walked if resource.is_in_order else sorted(walked, key=whole.index)) == whole
    for limit in (0, 1_001):
        assert await refused(site, resource.path, limit=limit) == "limit"


async def refused(site: ResourceSite, path: str, **more: object) -> str:
    """The parameter that the refusal names."""
    answer = await site.ask(path, **more)
    assert answer.status_code == 400, f"{path} {more}: {answer.text}"
    return str(answer.json()["error"]["param"])


@for_each(PAGED)
async def test_a_damaged_cursor_and_one_of_another_list_or_filter_is_refused(
    site: ResourceSite, resource: Resource
) -> None:
    _, own = await site.page(resource.path, limit=1)
    _, foreign = await site.page("/keys" if resource.path != "/keys" else "/limits", limit=1)
    assert own
    for cursor in ("zz", own[:-3], f"{own}!", foreign):
        assert await refused(site, resource.path, cursor=cursor) == "cursor", cursor
    for name, (value, _) in [*resource.filters.items()][:1]:
        assert (
            await refused(site, resource.path, cursor=own, **{name: value.format(then=site.then)}) == "cursor"
        )


@for_each([one for one in LISTS if one.filters])
async def test_each_filter_leaves_the_rows_that_it_names(site: ResourceSite, resource: Resource) -> None:
    whole = await site.rows(resource.path)
    for name, (template, field) in resource.filters.items():
        value = template.format(then=site.then)
        wanted = [row for row in whole if _matches(name, value, row[field])]
        assert wanted, name
        assert await site.rows(resource.path, **{name: value}) == wanted, name


def _matches(name: str, value: str, shown: Any) -> bool:
    if name in ("from", "since", "to", "until"):
        at_us = shown if isinstance(shown, int) else datetime.fromisoformat(shown).timestamp() * 1e6
        return (at_us >= datetime.fromisoformat(value).timestamp() * 1e6) == (name in ("from", "since"))
    if isinstance(shown, list):
        return any(value in one.values() for one in shown)
    return str(shown).lower() == value


@for_each(LISTS)
async def test_a_parameter_that_it_does_not_have_is_named(site: ResourceSite, resource: Resource) -> None:
    if resource.names_unknown or f"/admin/v1{resource.path.partition('?')[0]}" in DECLARED:
        assert await refused(site, resource.path, no_such_filter=1) == "no_such_filter"
    else:
        assert (await site.ask(resource.path, no_such_filter=1)).status_code == 200


@for_each(PAGES)
async def test_a_page_and_its_file_open_for_their_roles_and_show_members_their_tenants(
    site: ResourceSite, resource: Resource
) -> None:
    stranger = site.people["stranger"]
    for template in filter(None, (resource.page, resource.file)):
        path, is_for_members = template.format(tenant="t1"), "member" in resource.roles
        for role in sorted(ALL):
            answer = await site.people[role].get(path)
            assert answer.status_code == (200 if role in resource.roles else 403), f"{role}: {path}"
        answer = await stranger.get(path)
        if path != template or not is_for_members:
            assert answer.status_code == (404 if is_for_members else 403), path
            continue
        assert answer.status_code == 200, path
        assert tenants_in(answer.text) <= {"t2"}, path
        if "tenant" in resource.filters:
            known, unknown = [await stranger.get(with_query(path, tenant=name)) for name in ("t1", "no-such")]
            assert known.status_code == unknown.status_code >= 400, path
            assert tenants_in(known.text) <= {"t2"}, path


@for_each([one for one in PAGES if one.file])
async def test_a_file_has_the_rows_of_the_list(site: ResourceSite, resource: Resource) -> None:
    needed = resource.path.partition("?")[2] if "?" not in resource.file else ""
    path = f"{resource.file}?{needed}".rstrip("?")
    for name, (template, _) in {"": ("", ""), **resource.filters}.items():
        value = template.format(then=site.then)
        listed = await site.rows(resource.path, **({name: value} if name else {}))
        asked = with_query(path, **({CALLED_IN_CONSOLE.get(name, name): value} if name else {}))
        file = _file((await site.people["owner"].get(asked)).text)
        if resource.name == "usage":  # the list has more groups
            assert sum(int(row["requests"]) for row in file) == sum(row["requests"] for row in listed), name
            continue
        plain = {key for key, value in listed[0].items() if type(value) in (int, float, str)}
        shared = sorted(file[0].keys() & plain)
        assert len(shared) > 4
        wanted = [["" if row[key] is None else str(row[key]) for key in shared] for row in listed]
        rows = [[row[key] for key in shared] for row in file]
        assert rows in (wanted, wanted[::-1]), name
        assert not set(resource.secrets) & set(file[0])


def _file(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@for_each([one for one in PAGES if one.hostile])
async def test_a_hostile_text_is_text_on_the_page_in_the_file_and_in_the_list(
    site: ResourceSite, resource: Resource
) -> None:
    assert resource.hostile is not None
    owner, (table, column, which) = site.people["owner"], resource.hostile
    [before, *_] = site.execute(f"SELECT {column} FROM {table} WHERE {which}")
    site.execute(f"UPDATE {table} SET {column} = :text WHERE {which}", text=HOSTILE)
    try:
        page = await owner.get(resource.page.format(tenant="t1"))
        listed = await site.rows(resource.path)
        file = _file((await owner.get(resource.file)).text) if resource.file else []
    finally:
        change = f"UPDATE {table} SET {column} = :text WHERE {column} = :hostile"
        site.execute(change, text=before, hostile=HOSTILE)
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    assert "=1+1&lt;script&gt;alert(1)" in page.text
    assert any(HOSTILE in row.values() for row in listed)
    assert any(f"'{HOSTILE}" in row.values() for row in file) == bool(resource.file)
    assert not any(HOSTILE in row.values() or None in row.values() for row in file)


@for_each(CHANGED)
async def test_an_act_is_made_with_its_row_in_the_audit_or_not_at_all(
    site: ResourceSite, resource: Resource
) -> None:
    leaver = await site.rows("/sessions", person="leaver")
    names, tag = {"new": next(NEW), "id": "", "session": leaver[0]["id"] if leaver else ""}, ""
    for act in filter(None, (resource.make, *resource.acts)):
        call, body = act.call.format(**names), _filled(act.body, names)
        before = await _state(site, resource, names), site.acts()
        refusals = [(403, await site.call(call, body, "reader of t1", tag))]
        if act.is_conditional:
            stale = await site.call(call, body, if_match=f"{STALE}, W/{tag}" if tag else STALE)
            refusals.append((412, stale))
            assert stale.json()["error"]["code"] == "precondition_failed"
            assert stale.headers.get("etag", "") == tag or not tag
            assert (stale.json()["error"]["current"] is None) == ("etag" not in stale.headers)
        if act.wrong is not None:
            answer = await site.call(call, {**(body or {}), **act.wrong[0]}, if_match=tag)
            assert answer.json()["error"]["param"] == act.wrong[1], answer.text
            refusals.append((400, answer))
        site.execute("CREATE TRIGGER lost BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'lost'); END")
        refusals.append((500, await site.call(call, body, if_match=tag)))
        site.execute("DROP TRIGGER lost")
        assert [answer.status_code for _, answer in refusals] == [status for status, _ in refusals], call
        assert (await _state(site, resource, names), site.acts()) == before, call
        done = await site.call(call, body, if_match=f"{STALE}, {tag}" if tag else "")
        assert done.is_success, f"{call}: {done.text}"
        [(action, actor)] = site.acts()[len(before[1]) :]
        assert (action, actor.partition("_")[0]) == (act.action, "key:fg"), call
        names["id"], tag = names["id"] or str(done.json().get("id", "")), done.headers.get("etag", "")
        after = await _state(site, resource, names) if tag else ""
        assert after == tag or not after.startswith('"'), call


def _filled(body: Any, names: dict[str, str]) -> Any:
    return body and json.loads(re.sub(r"\{(new)\}", lambda name: names[name[1]], json.dumps(body)))


async def _state(site: ResourceSite, resource: Resource, names: dict[str, str]) -> str:
    """The object as it is stored; before it is made, which there are."""
    is_one = names["id"] or not resource.path
    answer = await site.ask((resource.show.format(**names) if is_one else "") or resource.path)
    rows = answer.json().get("data", [])
    return answer.headers.get("etag") or json.dumps([row.get("id", row) for row in rows])


async def test_a_secret_is_shown_once_and_nowhere_else(
    site: ResourceSite, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.clear()
    secrets = [browser.cookies["fairgate_session"] for browser in site.people.values()]
    for resource in RESOURCES:
        names, shown = {"new": next(NEW), "id": ""}, []
        for act in (resource.make, *resource.acts) if resource.secrets else ():
            if act is not None and (act is resource.make or act.action in ("key.rotate", "person.reset")):
                answer = (await site.call(act.call.format(**names), _filled(act.body, names))).json()
                names["id"] = answer["id"]
                shown += [re.split(r"token=|fg_live_\w+?_", answer[name])[-1] for name in resource.secrets]
        secrets += [*shown, f"9/{names['new']}"]  # the end of a webhook's URL
    assert len(secrets) == len(site.people) + len(RESOURCES) + 5
    shown_elsewhere = [caplog.text, repr(site.execute("SELECT entry FROM audit"))]
    for path in (*(one.path for one in LISTS), "/config", "/audit?act=key", "/audit/entries", "/status"):
        shown_elsewhere.append((await site.ask(path, limit=1_000)).text)
    for path in (path.format(tenant="t1") for one in PAGES for path in (one.page, one.file) if path):
        shown_elsewhere.append((await site.people["owner"].get(path)).text)
    assert [secret for secret in secrets if any(secret in text for text in shown_elsewhere)] == []


async def test_ten_thousand_rows_come_in_bounded_pages_and_files(
    _sqlite_template: Path,  # noqa: PT019
    tmp_path: Path,
) -> None:
    async with resource_site(_sqlite_template, tmp_path, 10_001) as large:
        owner = large.people["owner"]
        for resource in (one for one in LISTS if one.name in LARGE):
            with recorder() as heard:
                heard.start()
                for limit in (100, 1_000):
                    rows, cursor = await large.page(resource.path, limit=limit)
                    assert (len(rows), cursor is None) == (limit, False)
                page = await owner.get(resource.page)
                reads = [
                    one.text for one in heard.stop() if f"FROM {LARGE[resource.name]} " in one.text + " "
                ]
            assert len(page.text) < 200_000, resource.name
            assert reads
            assert [one for one in reads if "LIMIT" not in one and " IN (" not in one] == []
            file = await owner.get(resource.file)
            part = file.headers["link"].partition("<")[2].partition(">")[0]
            assert len(_file(file.text)) == 10_001, "and where the others are"
            assert len(_file((await owner.get(part)).text)) >= 1
