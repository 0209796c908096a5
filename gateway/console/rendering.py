"""Renders pages from templates, with the console's security headers.

The content security policy allows only our own files, nothing inline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from litestar import Response
from litestar.datastructures import Cookie

from gateway.console import assets, cookies
from gateway.console.access import Visit, token_of
from gateway.console.cards import cards
from gateway.console.form_errors import FormProblem
from gateway.console.formats import FILTERS
from gateway.console.forms import TOKEN_FIELD
from tenants.people.person import Person
from tenants.people.roles import Act
from tenants.resources.resource import Resource


@dataclass(frozen=True)
class Entry:
    path: str
    name: str
    """As in the template: `{% set here = '...' %}`."""
    words: str
    act: Act


LIVE, TENANTS, HISTORY, MONEY, SYSTEM = "Live", "Tenants", "History", "Money", "System"
MENU: dict[str, tuple[Entry, ...]] = {
    LIVE: (
        Entry("/console", "overview", "Overview", Act.OWN_ACCOUNT),
        Entry("/console/waiting", "waiting", "Waiting", Act.READ_TENANT),
    ),
    TENANTS: (
        Entry("/console/tenants", "tenants", "Tenants", Act.READ_TENANT),
        Entry("/console/keys", "keys", "Keys", Act.READ_TENANT),
    ),
    HISTORY: (
        Entry("/console/requests", "requests", "Requests", Act.READ_TENANT),
        Entry("/console/slo", "slo", "SLO", Act.READ_TENANT),
        Entry("/console/quotes", "quotes", "Quotes", Act.READ_PLATFORM),
    ),
    MONEY: (Entry("/console/usage", "usage", "Usage", Act.READ_TENANT),),
    SYSTEM: (
        Entry("/console/policy", "policy", "Policy", Act.READ_PLATFORM),
        Entry("/console/upstreams", "upstreams", "Upstreams", Act.READ_PLATFORM),
        Entry("/console/alerts", "alerts", "Alerts", Act.READ_TENANT),
        Entry("/console/audit", "audit", "Audit", Act.READ_PLATFORM),
        Entry("/console/people", "people", "People", Act.READ_PEOPLE),
        Entry("/console/settings", "settings", "Settings", Act.READ_PLATFORM),
    ),
}
"""By group."""
FURTHER = {"prices": MONEY}
"""Groups of further resources, by their page; others are in `SYSTEM`."""
_NAMES = {entry.name for entries in MENU.values() for entry in entries}


def menu_of(person: Person, resources: Iterable[Resource[Any]]) -> dict[str, list[Entry]]:
    """The menu by group: its fixed entries, and one for each further resource with a page."""
    menu = {group: [*entries] for group, entries in MENU.items()}
    for one in resources:
        if one.has_page and (one.menu or one.page or one.plural) not in _NAMES:
            name = one.page or one.plural
            menu[FURTHER.get(name, SYSTEM)].append(Entry(one.page_path, name, one.title, one.act))
    shown = {group: [one for one in menu[group] if person.may_somewhere(one.act)] for group in menu}
    return {group: entries for group, entries in shown.items() if entries}


def findable_by(person: Person) -> str:
    """What the search box finds for the person."""
    more = ((Act.READ_PEOPLE, "person"), (Act.READ_PLATFORM, "audit row"))
    return ", ".join(["Request", "tenant", "key", *(word for act, word in more if person.may(act))])


SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; font-src 'self'; connect-src 'self'; worker-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    # A set-up link is an address with a secret in it.
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
HTML = "text/html"


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals["asset"] = assets.address
    environment.globals["token_field"] = TOKEN_FIELD
    environment.filters.update(FILTERS, cards=cards)
    return environment


_TEMPLATES = _environment()


def render(template: str, visit: Visit | None, **shown: Any) -> str:
    """`visit` None: an error page before there is a visit."""
    person = visit.session.person if visit is not None and visit.session is not None else None
    return _TEMPLATES.get_template(template).render(
        person=person,
        menu={} if visit is None or person is None else menu_of(person, visit.resources),
        firing=0 if visit is None else visit.firing,
        findable="" if person is None else findable_by(person),
        may_read_people=person is not None and person.may(Act.READ_PEOPLE),
        may_change_people=person is not None and person.may(Act.CHANGE_PEOPLE),
        token="" if visit is None else token_of(visit, before_log_in=False),
        form_token="" if visit is None else token_of(visit, before_log_in=True),
        **shown,
    )


def page_response(
    template: str,
    visit: Visit,
    *,
    status: int = 200,
    problem: FormProblem | None = None,
    set_cookies: Iterable[Cookie] = (),
    **shown: Any,
) -> Response[str]:
    text = render(template, visit, errors=problem.errors if problem else {}, **shown)
    new = [cookies.cookie(cookies.FORM, visit.form_cookie, secure=visit.is_https)]
    return Response(
        text,
        status_code=problem.status if problem else status,
        headers={**SECURITY_HEADERS, **(problem.headers if problem else {})},
        cookies=[*set_cookies, *(new if visit.is_new_form_cookie and visit.session is None else ())],
        media_type=HTML,
    )


def confirm_page(
    visit: Visit,
    *,
    title: str,
    effects: Sequence[str],
    action: str,
    button: str,
    back: str,
    hidden: Mapping[str, str] | None = None,
    reason: str | None = None,
    problem: FormProblem | None = None,
) -> Response[str]:
    """`effects`: sentences on what stops, and for whom. The form posts `hidden` to `action`. `reason`: as
    typed; None: none is asked for. `problem`: why the page is shown again."""
    return page_response(
        "confirm.html",
        visit,
        problem=problem,
        title=title,
        effects=effects,
        action=action,
        button=button,
        back=back,
        hidden=hidden or {},
        reason=reason,
    )


def redirect(path: str, set_cookies: Iterable[Cookie] = ()) -> Response[str]:
    return Response(
        "",
        status_code=303,
        headers={**SECURITY_HEADERS, "location": path},
        cookies=list(set_cookies),
        media_type=HTML,
    )


def session_cookies(visit: Visit, cookie_value: str) -> list[Cookie]:
    """Cookies of a new session; earlier forms become void."""
    secure = visit.is_https
    return [
        cookies.cookie(cookies.SESSION, cookie_value, secure=secure),
        cookies.cleared(cookies.FORM, secure=secure),
    ]


def signed_in(visit: Visit, cookie_value: str, path: str) -> Response[str]:
    return redirect(path, session_cookies(visit, cookie_value))
