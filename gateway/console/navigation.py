"""The console's pages by name, and which of them a person sees. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tenants.people.person import Person
from tenants.people.roles import Act


@dataclass(frozen=True)
class Entry:
    path: str
    name: str
    """As in the template: `{% set here = '...' %}`."""
    words: str
    act: Act


ENTRIES = (
    Entry("/console", "start", "Start", Act.OWN_ACCOUNT),
    Entry("/console/overview", "overview", "Overview", Act.READ_PLATFORM),
    Entry("/console/waiting", "waiting", "Waiting", Act.READ_TENANT),
    Entry("/console/tenants", "tenants", "Tenants", Act.READ_TENANT),
    Entry("/console/keys", "keys", "Keys", Act.READ_TENANT),
    Entry("/console/usage", "usage", "Usage", Act.READ_TENANT),
    Entry("/console/requests", "requests", "Requests", Act.READ_TENANT),
    Entry("/console/refusals", "refusals", "Refusals", Act.READ_TENANT),
    Entry("/console/slo", "slo", "SLO", Act.READ_TENANT),
    Entry("/console/alerts", "alerts", "Alerts", Act.READ_TENANT),
    Entry("/console/quotes", "quotes", "Quotes", Act.READ_PLATFORM),
    Entry("/console/policy", "policy", "Policy", Act.READ_PLATFORM),
    Entry("/console/upstreams", "upstreams", "Upstreams", Act.READ_PLATFORM),
    Entry("/console/audit", "audit", "Audit", Act.READ_PLATFORM),
    Entry("/console/people", "people", "People", Act.READ_PEOPLE),
    Entry("/console/settings", "settings", "Settings", Act.READ_PLATFORM),
    Entry("/console/sessions", "sessions", "Sessions", Act.OWN_ACCOUNT),
    Entry("/console/password", "password", "Password", Act.OWN_ACCOUNT),
)


def entries_for(person: Person) -> list[Entry]:
    return [entry for entry in ENTRIES if person.may_somewhere(entry.act)]
