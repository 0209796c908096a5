"""Calls of a running server's admin API by the command line.

The server is found by a file in its data directory, which holds the token that lets its owner administer it.
In its refusals a route's name becomes the command that does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import LATE_KEY, Failure, settings_now

if TYPE_CHECKING:
    from ops.serving.datadir import ServerFile

COMMANDS = {
    "GET /admin/v1/requests": "`fairgate request list`",
    "GET /v1/requests": "`fairgate request list`",
    "DELETE /v1/requests/{id}": "`fairgate request cancel`",
    "GET /v1/models": "`fairgate model list`",
    "POST /v1/quotes": "`fairgate quote`",
    "POST /admin/v1/ledger/verify": "`fairgate ledger verify`",
    "GET /docs": "`fairgate --help`",
}
"""A route that messages of the API name, and the command that does the same."""

NOT_IN_FORCE = "not_in_force_on"
"""Of an answer: gateways that have not confirmed the change; `answer` tells of them."""


def running_server() -> ServerFile | None:
    from ops.serving import datadir

    return datadir.running_server(settings_now().data_dir)


def require_server() -> ServerFile:
    """Raises `Failure` where no server runs on this data directory."""
    server = running_server()
    if server is None:
        raise Failure("no server runs on this data directory: start one with `fairgate serve`")
    return server


def call(
    server: ServerFile,
    method: str,
    path: str,
    *,
    query: Mapping[str, str | int | None] | None = None,
    body: object = None,
    timeout_s: float = 30.0,
) -> dict[str, Any]:
    """The answer of `/admin/v1` + `path`; None in `query`: not given. Raises `Failure`."""
    import httpx

    try:
        response = httpx.request(
            method,
            f"{server.url_of_admin}/admin/v1{path}",
            params={name: value for name, value in (query or {}).items() if value is not None},
            headers={"authorization": f"Bearer {server.control_token}"},
            json=body,
            timeout=timeout_s,
        )
        answered: dict[str, Any] = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failure(f"the server at {server.url_of_admin} does not answer: {error}") from None
    except ValueError:
        raise Failure(f"{server.url_of_admin} answered without JSON: is this a Fairgate server?") from None
    if response.is_error:
        raise Failure(in_commands(str(answered["error"]["message"])))
    context = click.get_current_context(silent=True)
    if context is not None and (late := answered.pop(NOT_IN_FORCE, None)):
        context.meta[LATE_KEY] = late
    return answered


def in_commands(message: str) -> str:
    """A message of the API, with commands in place of routes."""
    for route, command in COMMANDS.items():
        message = message.replace(route, command)
    return message
