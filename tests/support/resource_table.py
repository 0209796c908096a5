"""The resources of the admin API as a table: lists, filters, pages, files, acts, secrets of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL = frozenset({"owner", "operator", "auditor", "member"})
PLATFORM = ALL - {"member"}
PEOPLE = frozenset({"owner", "auditor"})


@dataclass(frozen=True)
class Act:
    """A change. In call and body `{id}` is the object's id and `{new}` a name that is not taken."""

    call: str
    action: str
    """In the audit."""
    body: Mapping[str, Any] | None = None
    wrong: tuple[Mapping[str, Any], str] | None = None
    """Fields of the body that are refused, and the one that the refusal names."""
    is_conditional: bool = True
    """Takes `If-Match`."""


@dataclass(frozen=True)
class Resource:
    name: str
    path: str = ""
    """Of the list for admins, with the parameters that it needs; empty: there is no list."""
    own: str = ""
    """Of the list for the tenant itself."""
    filters: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By parameter: a value, and the field of a row that then has it. Of a time, `{then}`, the field is later
    or earlier."""
    is_paged: bool = True
    is_in_order: bool = True
    """Also across pages: not so where each page has its rows of one instant in an order of its own."""
    names_unknown: bool = False
    """A parameter that it does not have is refused, and not ignored."""
    page: str = ""
    """Of the console; `{tenant}`: there is one for each tenant."""
    file: str = ""
    roles: frozenset[str] = ALL
    """Who may open page and file; a member sees the own tenants."""
    hostile: tuple[str, str, str] | None = None
    """Table and column whose text stands on the page, and the row."""
    make: Act | None = None
    show: str = ""
    acts: tuple[Act, ...] = ()
    """On one object, in this order."""
    secrets: tuple[str, ...] = ()
    """Fields of an act's answer that are shown there and nowhere else."""


TENANT, MODEL, TIER = ("t1", "tenant"), ("model-1", "model"), ("batch", "tier")
TIME = {"from": ("{then}", "at"), "to": ("{then}", "at")}
OF_REQUESTS = {
    "tenant": TENANT, "project": ("prj_1", "project_id"), "key": ("key_1", "key_id"), "model": MODEL,
    "tier": TIER,
}  # fmt: skip
TENANT_NAME = ("tenants", "name", "id = 'ten_1'")
DAILY = {"meter": "requests", "window": "day", "amount": 5}

RESOURCES = (
    Resource(
        "tenants", "/tenants", filters={"search": ("t1", "name")},
        page="/console/tenants", file="/console/tenants.csv", hostile=TENANT_NAME, show="/tenants/{id}",
        make=Act("POST /tenants", "tenant.create", {"name": "{new}"}, ({"name": "<b>"}, "name"), False),
        acts=(
            Act("PATCH /tenants/{id}", "tenant.update", {"weight": 3}, ({"weight": -1}, "weight")),
            Act("POST /tenants/{id}/suspend", "tenant.suspend", {"now": True}),
            Act("POST /tenants/{id}/resume", "tenant.resume"),
        ),
    ),
    Resource(
        "projects", "/projects", filters={"tenant": TENANT}, page="/console/tenants/{tenant}/projects",
        hostile=("projects", "name", "id = 'prj_1'"), show="/projects/{id}",
        make=Act("POST /projects", "project.create", {"tenant": "t1", "name": "{new}"},
                 ({"name": "a b"}, "name"), False),
        acts=(
            Act("POST /projects/{id}/suspend", "project.suspend"),
            Act("POST /projects/{id}/resume", "project.resume"),
        ),
    ),
    Resource(
        "keys", "/keys", filters={"tenant": TENANT}, page="/console/keys", file="/console/keys.csv",
        hostile=("api_keys", "name", "id = 'key_1'"), show="/keys/{id}", secrets=("key",),
        make=Act("POST /keys", "key.create", {"tenant": "t1", "name": "{new}"},
                 ({"allow_from": ["10.0.0.1/8"]}, "allow_from"), False),
        acts=(
            Act("PATCH /keys/{id}", "key.update", {"name": "other"}, ({"scopes": []}, "scopes")),
            Act("POST /keys/{id}/rotate", "key.rotate", {"grace_s": 60}, ({"grace_s": -1}, "grace_s")),
            Act("DELETE /keys/{id}", "key.revoke"),
        ),
    ),
    Resource(
        "limits", "/limits", "/v1/limits", {"tenant": TENANT}, page="/console/tenants/{tenant}/limits",
        hostile=("limits", "model", "id = 'lim_1'"), show="/limits/{id}",
        make=Act("POST /limits", "limit.set", {"tenant": "t1", "end_user": "{new}"} | DAILY,
                 ({"amount": -1}, "amount")),
        acts=(
            Act("POST /limits/{id}/override", "limit.override",
                {"amount": 9, "reason": "a launch", "for_s": 60}, ({"reason": ""}, "reason")),
            Act("DELETE /limits/{id}/override", "limit.clear_override"),
            Act("DELETE /limits/{id}", "limit.remove"),
        ),
    ),
    Resource(
        "slos", "/slos", show="/slos/{id}",
        make=Act("POST /slos", "slo.set", {"tier": "batch", "metric": "ttft", "target_s": 2.0},
                 ({"target_s": -1}, "target_s")),
        acts=(Act("DELETE /slos/{id}", "slo.remove"),),
    ),
    Resource(
        "prices", "/prices", filters={"model": ("model-1", "model")}, show="/prices?model={new}",
        make=Act("POST /prices", "price.set", {"model": "{new}", "input_nanousd": 1, "output_nanousd": 2},
                 ({"input_nanousd": -1}, "input_nanousd")),
    ),
    Resource(
        "aliases", "/aliases/stored", page="/console/aliases", roles=PLATFORM, show="/aliases/stored/{id}",
        make=Act("POST /aliases/stored", "alias.set", {"name": "{new}", "means": "model-1"},
                 ({"means": "a = x"}, "means")),
        acts=(Act("DELETE /aliases/stored/{id}", "alias.remove"),),
    ),
    Resource("price history", "/prices/history?model=model-1", is_in_order=False),
    Resource(
        "policy", show="/policy?decisions=0&steps=0",
        make=Act("POST /policy", "policy.set", {"policy": "fcfs"}, ({"policy": "none"}, "policy")),
        acts=(Act("POST /policy", "policy.from_settings", {"from_settings": True}),),
    ),
    Resource(
        "people", "/people", page="/console/people", roles=PEOPLE, show="/people/{id}",
        hostile=("people", "name", "name = 'operator'"), secrets=("link",),
        make=Act("POST /people", "person.invite", {"name": "{new}", "role": "auditor"},
                 ({"role": "king"}, "role"), False),
        acts=(
            Act("PATCH /people/{id}", "person.update", {"role": "operator"}, ({"role": "king"}, "role")),
            Act("POST /people/{id}/suspend", "person.suspend"),
            Act("POST /people/{id}/resume", "person.resume"),
            Act("POST /people/{id}/reset", "person.reset"),
            Act("DELETE /people/{id}/sessions", "person.end_sessions"),
            Act("DELETE /people/{id}", "person.erase"),
        ),
    ),
    Resource(
        "sessions", "/sessions", filters={"person": ("owner", "person")},
        acts=(Act("DELETE /sessions/{session}", "session.end", is_conditional=False),),
    ),
    Resource(
        "webhooks", "/webhooks", page="/console/alerts", hostile=("webhooks", "host", "id = 'whk_1'"),
        show="/webhooks/{id}", secrets=("secret",),
        make=Act("POST /webhooks", "webhook.add", {"url": "http://127.0.0.1:9/{new}"},
                 ({"url": "x"}, "url"), False),
        acts=(
            Act("POST /webhooks/{id}/test", "webhook.test", is_conditional=False),
            Act("POST /webhooks/{id}/resend", "webhook.resend", {}, is_conditional=False),
            Act("DELETE /webhooks/{id}", "webhook.remove", is_conditional=False),
        ),
    ),
    Resource(
        "deliveries", "/webhooks/whk_1/deliveries", filters={"state": ("dead", "state")}, is_paged=False,
    ),
    Resource("alerts", "/alerts", filters={"state": ("firing", "state")}),
    Resource(
        "brakes", show="/brake",
        make=Act("PUT /brake", "brake.set", {"tier": "batch", "share": 0.5, "for_s": 60},
                 ({"share": 2}, "share")),
        acts=(Act("DELETE /brake?tier=batch", "brake.end"),),
    ),
    Resource(
        "drains", show="/upstreams",
        make=Act("POST /upstreams/away/drain", "upstream.drain", {"reason": "a card"},
                 ({"reason": "x" * 1_000}, "reason")),
        acts=(Act("POST /upstreams/away/resume", "upstream.resume"),),
    ),
    Resource(
        "configuration", show="/config",
        make=Act("POST /config/apply", "tenant.update",
                 {"version": 1, "tenants": [{"name": "t3", "weight": 3}]},
                 ({"tenants": [{"name": "t3", "weight": -1}]}, "tenants[0].weight")),
    ),
    Resource(
        "refusals", "/refusals", "/v1/refusals",
        OF_REQUESTS | TIME | {"code": ("insufficient_quota", "code"), "limit_id": ("lim_1", "limit_id"),
                              "request_id": ("ref_1", "request_id")},
        page="/console/refusals", file="/console/refusals.csv",
        hostile=("refusals", "model", "request_id = 'ref_30'"),
    ),
    Resource(
        "refusal counts", "/refusals/counts?window=minute",
        filters={"tenant": TENANT, "code": ("insufficient_quota", "code"), "limit_id": ("lim_1", "limit_id")},
    ),
    Resource(
        "ended requests", "/requests/ended",
        filters=OF_REQUESTS | {"outcome": ("failed", "outcome"), "cause": ("capacity", "misses"),
                               "from": ("{then}", "ended_at"), "to": ("{then}", "ended_at")},
        page="/console/requests", file="/console/requests.csv",
        hostile=TENANT_NAME,
    ),
    Resource(
        "misses", "/slo/misses",
        filters={"tenant": TENANT, "tier": TIER, "cause": ("capacity", "cause"),
                 "from": ("{then}", "ended_us"), "to": ("{then}", "ended_us")},
        page="/console/slo/misses", file="/console/slo/misses.csv", hostile=TENANT_NAME,
    ),
    Resource(
        "audit", "/audit?actor=cli:root",
        filters={"tenant": TENANT, "act": ("limit.set", "action"),
                 "subject": ("lim_1", "target"), "since": ("{then}", "at"), "until": ("{then}", "at")},
        page="/console/audit", file="/console/audit.csv", roles=PLATFORM,
        hostile=TENANT_NAME,
    ),
    Resource(
        "moves", "/policy/moves",
        filters=TIME | {"model": MODEL, "knob": ("batch_cap", "knob"), "made": ("true", "is_made")},
        page="/console/policy", roles=PLATFORM, hostile=("control_moves", "reason", "move_id = 'mov_30'"),
    ),
    Resource("flow", "/flow", filters={"tenant": TENANT, "pool": ("model-1", "pool"), "tier": TIER}),
    Resource(
        "engine minutes", "/engines", filters={"pool": ("model-1", "pool"), "replica": ("away", "replica")},
    ),
    Resource(
        "calibration", "/calibration",
        filters={"model": MODEL, "tier": TIER, "figure": ("ttft", "figure"), "kind": ("plain", "kind")},
    ),
    Resource(
        "usage", "/usage?group_by=tenant,project,key,model,tier,outcome",
        "/v1/usage?group_by=project,key,model,tier,outcome", OF_REQUESTS | {"outcome": ("failed", "outcome")},
        page="/console/usage?group=model", file="/console/usage/csv?group=model&window=total",
        hostile=("usage_sums", "model", "model = 'model-1'"),
        acts=(Act("POST /usage/rebuild", "usage.rebuild", is_conditional=False),), names_unknown=True,
    ),
    Resource("calls of agents", "/tenants/t1/sessions", "/v1/sessions", is_paged=False),
)  # fmt: skip
NEITHER = {
    "POST /admin/v1/config/plan": "it reads",
    "POST /admin/v1/ledger/verify": "it reads",
    "POST /admin/v1/usage/verify": "it reads",
    "DELETE /admin/v1/requests/{request_id}": "it needs a request that runs",
    "POST /admin/v1/requests/{request_id}/tier": "it needs a request that waits",
    "POST /admin/v1/ledger/adjust": "it needs a request whose hold is in doubt",
    **{
        f"{call} /admin/v1/alerts/{{alert}}/{act}": "it needs an alert"
        for call, act in (("POST", "acknowledge"), ("POST", "silence"), ("DELETE", "silence"))
    },
}
"""Routes that are no GET and no act of a resource here."""
