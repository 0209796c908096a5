"""`fairgate upstream`: replicas of the running server's models; takes one out of rotation, and back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from ops.cli.base import Command, Failure, Group, answer
from ops.cli.live import call, require_server
from ops.cli.options import Number
from ops.reporting import table

if TYPE_CHECKING:
    from ops.serving.datadir import ServerFile

MOST_WAIT_S = 3_600.0
POLL_S = 0.2


@click.group(cls=Group)
def upstream() -> None:
    """Replicas of the models: list, drain, resume.

    Needs a running server.

    \b
      fairgate upstream list
      fairgate upstream drain llama-a --reason "new driver"
      fairgate upstream resume llama-a

    A drained replica gets no new requests from any gateway, also after restarts. Running requests on our
    engines move to others; on other servers they finish there. Waiting ones go to other replicas; without
    one they are refused as `engine_unavailable`.
    """


@upstream.command(name="list")
def list_() -> None:
    """Lists the replicas of every model: whether they get new requests and what runs there.

    The number that runs counts the requests of all gateways that share a Redis. A replica that is `drained`
    has none left: it can be stopped.

    \b
    --json answers:
      {"data": [{"pool": "llama", "is_up": true, "context_tokens": 8192,
       "queued": {"interactive": 0, "standard": 0, "batch": 0},
       "replicas": [{"replica_id": "llama-a", "kind": "openai", "url": "http://10.0.0.5:8000/v1",
       "state": "draining", "in_flight": 3, "refusal": "", "drain": {"pool": "llama", "replica": "llama-a",
       "since": "2026-01-31T18:00:00+00:00", "by": "cli:root",
       "reason": "new driver"}, …}]}], "drained_elsewhere": [], "gateways_missing": 0}
    """
    document = call(require_server(), "GET", "/upstreams")
    answer(document, lambda: _show(document))


def _show(document: dict[str, Any]) -> None:
    rows = [
        (
            shown["replica_id"],
            pool["pool"],
            shown["state"],
            str(shown["in_flight"]),
            shown["url"],
            _about(shown["drain"]) if shown["drain"] is not None else shown["refusal"],
        )
        for pool in document["data"]
        for shown in pool["replicas"]
    ]
    rows += [
        (row["replica"], row["pool"], "drained, elsewhere", "", "", _about(row))
        for row in document["drained_elsewhere"]
    ]
    table("replicas", ("replica", "model", "state", "running", "address", "why"), rows)
    if document["gateways_missing"]:
        click.echo(f"{document['gateways_missing']} gateways did not answer: theirs are not counted")


def _about(drain: dict[str, Any]) -> str:
    said = f"drained by {drain['by']} since {drain['since']}"
    return f"{said}: {drain['reason']}" if drain["reason"] else said


@upstream.command(cls=Command)
@click.argument("replica")
@click.option("--reason", default="", help="Why; shown with the drain and in the audit.")
@click.option(
    "--within",
    "within_s",
    type=Number(float, 0, MOST_WAIT_S),
    default=MOST_WAIT_S,
    show_default=True,
    metavar="SECONDS",
    help="Seconds to wait until nothing runs there; 0: do not wait.",
)
def drain(replica: str, reason: str, within_s: float) -> None:
    """Takes a replica out of rotation in every gateway, and waits until it is empty.

    What runs on an engine of ours moves to the model's other engines as soon as there is room, token for
    token. What runs on another server ends there. Exit code 1: something runs there still; it stays drained.

    \b
    --json answers:
      {"pool": "llama", "replica": "llama-a", "since": "2026-01-31T18:00:00+00:00", "by": "control",
       "reason": "new driver", "state": "drained", "in_flight": 0}
    """
    server = require_server()
    shown = call(server, "POST", f"/upstreams/{_part(replica)}/drain", body={"reason": reason})
    pools = call(server, "GET", "/upstreams")["data"]
    if any(pool["pool"] == shown["pool"] and not pool["is_up"] for pool in pools):
        click.echo(
            f"No other replica of {shown['pool']} serves: what runs there goes on there, and new requests are"
            f" refused until one serves or `fairgate upstream resume {replica}`.",
            err=True,
        )
    until_s = time.monotonic() + within_s
    while True:
        now = _now(server, replica)
        is_over = now["state"] == "drained"
        if is_over or time.monotonic() >= until_s:
            break
        time.sleep(POLL_S)
    if within_s and not is_over:
        raise Failure(
            f"{now['in_flight']} requests run on {replica} after {within_s:g} s: it stays drained, and"
            " `fairgate upstream list` shows when nothing runs there"
        )
    what = "nothing runs there any more" if is_over else "`fairgate upstream list` shows what runs there"
    answer(shown | now, f"{shown['replica']} of {shown['pool']} gets no new requests; {what}")


def _now(server: ServerFile, replica: str) -> dict[str, Any]:
    pools = call(server, "GET", "/upstreams")["data"]
    found = [each for pool in pools for each in pool["replicas"] if each["replica_id"] == replica]
    if not found:  # a member that has left
        return {"state": "drained", "in_flight": 0}
    return {"state": found[0]["state"], "in_flight": found[0]["in_flight"]}


@upstream.command(cls=Command)
@click.argument("replica")
def resume(replica: str) -> None:
    """Puts a drained replica back into rotation in every gateway.

    \b
    --json answers the drain that has ended:
      {"pool": "llama", "replica": "llama-a", …}
    """
    shown = call(require_server(), "POST", f"/upstreams/{_part(replica)}/resume")
    answer(shown, f"{shown['replica']} of {shown['pool']} gets new requests again")


def _part(text: str) -> str:
    return quote(text, safe="")
