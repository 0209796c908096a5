"""What the command line can do, the admin API can.

By hand: the routes that do what a command does. Which commands and routes there are, the applications say, so
a new command without a line here fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from ops.cli.main import cli
from tests.support.documents import routes

ROUTES: dict[str, tuple[str, ...]] = {
    "top": ("GET /admin/v1/status",),
    "status": ("GET /admin/v1/status",),
    "tenant create": ("POST /admin/v1/tenants",),
    "tenant set": ("PATCH /admin/v1/tenants/{tenant}",),
    "tenant list": ("GET /admin/v1/tenants",),
    "tenant show": ("GET /admin/v1/tenants/{tenant}",),
    "tenant suspend": ("POST /admin/v1/tenants/{tenant}/suspend",),
    "tenant resume": ("POST /admin/v1/tenants/{tenant}/resume",),
    "project create": ("POST /admin/v1/projects",),
    "project list": ("GET /admin/v1/projects",),
    "project suspend": ("POST /admin/v1/projects/{project}/suspend",),
    "project resume": ("POST /admin/v1/projects/{project}/resume",),
    "key create": ("POST /admin/v1/keys",),
    "key set": ("PATCH /admin/v1/keys/{key}",),
    "key list": ("GET /admin/v1/keys",),
    "key revoke": ("DELETE /admin/v1/keys/{key}",),
    "key rotate": ("POST /admin/v1/keys/{key}/rotate",),
    "limit set": ("POST /admin/v1/limits",),
    "limit override": ("POST /admin/v1/limits/{limit}/override", "DELETE /admin/v1/limits/{limit}/override"),
    "limit list": ("GET /admin/v1/limits",),
    "limit show": ("GET /admin/v1/limits/{limit}",),
    "limit remove": ("DELETE /admin/v1/limits/{limit}",),
    "slo set": ("POST /admin/v1/slos",),
    "slo list": ("GET /admin/v1/slos",),
    "slo remove": ("DELETE /admin/v1/slos/{slo}",),
    "alias set": ("POST /admin/v1/aliases/stored",),
    "alias list": ("GET /admin/v1/aliases/stored",),
    "alias remove": ("DELETE /admin/v1/aliases/stored/{alias}",),
    "slo report": ("GET /admin/v1/slo/report",),
    "slo misses": ("GET /admin/v1/slo/misses",),
    "brake": ("GET /admin/v1/brake", "PUT /admin/v1/brake", "DELETE /admin/v1/brake"),
    "request list": ("GET /admin/v1/requests", "GET /admin/v1/requests/ended"),
    "flow show": ("GET /admin/v1/flow",),
    "flow engines": ("GET /admin/v1/engines",),
    "request cancel": ("DELETE /admin/v1/requests/{request_id}",),
    "request move": ("POST /admin/v1/requests/{request_id}/tier",),
    "request show": ("GET /admin/v1/requests/{request_id}",),
    "refusal list": ("GET /admin/v1/refusals",),
    "refusal counts": ("GET /admin/v1/refusals/counts",),
    "forecast calibration": ("GET /admin/v1/calibration",),
    "quote": ("POST /v1/quotes",),
    "audit list": ("GET /admin/v1/audit",),
    "audit export": ("GET /admin/v1/audit/entries", "GET /admin/v1/audit/checkpoints"),
    "audit prove": ("GET /admin/v1/audit/proof",),
    "audit follow": ("GET /admin/v1/audit/log", "GET /admin/v1/audit/consistency", "GET /admin/v1/audit"),
    "price set": ("POST /admin/v1/prices",),
    "price list": ("GET /admin/v1/prices",),
    "price history": ("GET /admin/v1/prices/history",),
    "model list": ("GET /admin/v1/upstreams", "GET /admin/v1/aliases"),
    "engine list": ("GET /admin/v1/upstreams",),
    "upstream list": ("GET /admin/v1/upstreams",),
    "upstream drain": ("POST /admin/v1/upstreams/{replica}/drain",),
    "upstream resume": ("POST /admin/v1/upstreams/{replica}/resume",),
    "ledger verify": ("POST /admin/v1/ledger/verify",),
    "ledger show": ("GET /admin/v1/ledger/{request_id}",),
    "ledger adjust": ("POST /admin/v1/ledger/adjust",),
    "policy show": ("GET /admin/v1/policy",),
    "policy moves": ("GET /admin/v1/policy/moves",),
    "policy set": ("POST /admin/v1/policy",),
    "forecast report": ("GET /admin/v1/forecasts",),
    "export": ("GET /admin/v1/config",),
    "diff": ("POST /admin/v1/config/plan",),
    "apply": ("POST /admin/v1/config/apply",),
    "person list": ("GET /admin/v1/people",),
    "person invite": ("POST /admin/v1/people",),
    "person role": ("PATCH /admin/v1/people/{person}",),
    "person suspend": ("POST /admin/v1/people/{person}/suspend",),
    "person resume": ("POST /admin/v1/people/{person}/resume",),
    "person reset": ("POST /admin/v1/people/{person}/reset",),
    "person erase": ("DELETE /admin/v1/people/{person}",),
    "person sessions": ("GET /admin/v1/sessions",),
    "person end-session": ("DELETE /admin/v1/sessions/{session}",),
    "webhook add": ("POST /admin/v1/webhooks",),
    "webhook list": ("GET /admin/v1/webhooks",),
    "webhook remove": ("DELETE /admin/v1/webhooks/{webhook}",),
    "webhook test": ("POST /admin/v1/webhooks/{webhook}/test",),
    "webhook deliveries": ("GET /admin/v1/webhooks/{webhook}/deliveries",),
    "webhook resend": ("POST /admin/v1/webhooks/{webhook}/resend",),
    "alerts list": ("GET /admin/v1/alerts",),
    "alerts runbook": ("GET /runbooks/{subject}",),
    "alerts acknowledge": ("POST /admin/v1/alerts/{alert}/acknowledge",),
    "alerts silence": ("POST /admin/v1/alerts/{alert}/silence",),
    "alerts unsilence": ("DELETE /admin/v1/alerts/{alert}/silence",),
    "usage show": ("GET /admin/v1/usage",),
    "usage sessions": ("GET /admin/v1/tenants/{tenant}/sessions",),
    "usage export": ("GET /admin/v1/usage/export",),
    "usage rebuild": ("POST /admin/v1/usage/rebuild",),
    "usage verify": ("POST /admin/v1/usage/verify",),
}
OF_THIS_MACHINE = {
    "serve": "it is the server",
    "demo": "it starts a server of its own",
    "engine keys": "files of the data directory",
    "db upgrade": "before a server may run",
    "db downgrade": "while no server may run",
    "db current": "before a server may run",
    "db grant": "with the rights of the tables' owner, which a server has not",
    "audit checkpoint": "signs with the key of the data directory; gateways do it by themselves",
    "audit key make": "a file of the data directory, before a server starts",
    "audit key rotate": "replaces the file of the data directory",
    "audit verify": "who doubts the server does not ask it",
    "backup create": "copies files of the data directory",
    "backup verify": "a copy is checked without a server",
    "restore": "before a server may run",
    "completion": "a script for the shell",
    "doctor": "looks at what a server that does not start needs",
    "plugin build": "builds a package",
    "model check": "tries servers before they are put into the settings",
    "alerts rules": "what the program knows; no server is asked",
    "policy list": "what the program knows; no server is asked",
    "policy explain": "what the program knows; no server is asked",
    "policy solve": "computes a file",
    "policy learn": "computes a file",
    "forecast train": "computes a file",
    "simulate": "runs without a server",
    "whatif": "runs without a server",
}
"""Commands without a route, each with the reason."""
GROUPS_OF_THIS_MACHINE = ("bench", "place")


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if not path and name in GROUPS_OF_THIS_MACHINE:
            continue
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name))


def test_every_command_has_a_route_that_does_the_same_or_a_reason_why_not() -> None:
    commands = list(leaves(cli))
    assert len(commands) > 50
    assert set(commands) == set(ROUTES) | set(OF_THIS_MACHINE)
    assert not set(ROUTES) & set(OF_THIS_MACHINE)


def test_the_routes_are_there() -> None:
    named = {tuple(route.split(" ", 1)) for each in ROUTES.values() for route in each}
    assert named - routes() == set()
