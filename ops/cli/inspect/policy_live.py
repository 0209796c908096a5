"""`fairgate policy show` and `fairgate policy set`: the policy of a running server."""

from __future__ import annotations

from typing import Any

import click

from ops.cli.base import Command, Failure, answer, settings_now
from ops.reporting import table


@click.command(cls=Command)
@click.option(
    "--decisions", type=click.IntRange(0, 256), default=20, show_default=True, help="How many of the last."
)
def show(decisions: int) -> None:
    """The policy in force, and the last decisions of each engine.

    For every admission and every eviction: the rule that chose, the rank in the order (the smaller, the
    earlier), and who was displaced or who it gave way to.

    \b
    --json answers:
      {"policy": "hybrid", "order": "hybrid", "policies": ["drr", ...], "engines": [{"engine_id": "engine-0",
       "is_up": true, "policy": "hybrid", "choices": {"order": "hybrid", "admit": "peak", ...},
       "decisions": [{"step": 17, "at_s": 3.2, "kind": "admit", "sequence_id": "...", "rule": "...",
       "rank": [1, 0, 12.5], "others": []}]}]}
    """
    _print(_ask("GET", f"?decisions={decisions}"))


@click.command("set", cls=Command)
@click.argument("name")
def set_policy(name: str) -> None:
    """Changes the policy of the running server, from its next step on.

    Nothing that waits or runs is lost. It holds until the server stops; the setting `policy` decides what it
    starts with. `fairgate policy list` has the names.

    \b
      fairgate policy set srpt
    --json answers what `policy show --decisions 0` does:
      {"policy": "srpt", "order": "srpt", "policies": ["drr", ...], "engines": [...]}
    """
    _print(_ask("POST", body={"policy": name}))


def _ask(method: str, query: str = "", body: dict[str, Any] | None = None) -> dict[str, Any]:
    import httpx

    from ops.serving import datadir

    server = datadir.running_server(settings_now().data_dir)
    if server is None:
        raise Failure("no server runs on this data directory: start one with `fairgate serve`")
    try:
        response = httpx.request(
            method,
            f"{server.url}/admin/v1/policy{query}",
            headers={"authorization": f"Bearer {server.control_token}"},
            json=body,
            timeout=30.0,
        )
    except httpx.HTTPError as error:
        raise Failure(f"the server at {server.url} does not answer: {error}") from None
    shown: dict[str, Any] = response.json()
    if response.status_code != 200:
        raise Failure(str(shown["error"]["message"]))
    return shown


def _print(shown: dict[str, Any]) -> None:
    def text() -> None:
        click.echo(f"policy {shown['policy']} (the queue's order: {shown['order']})")
        for engine in shown["engines"]:
            if not engine["is_up"]:
                click.echo(f"engine {engine['engine_id']} is down")
                continue
            choices = ", ".join(f"{decision} {name}" for decision, name in engine["choices"].items())
            click.echo(f"engine {engine['engine_id']}: {engine['policy']} ({choices})")
            if engine["decisions"]:
                table(
                    "last decisions",
                    ("step", "what", "sequence", "rule", "rank", "displaced / gave way to"),
                    [
                        (
                            each["step"],
                            each["kind"],
                            each["sequence_id"],
                            each["rule"],
                            " ".join(f"{number:.6g}" for number in each["rank"]),
                            " ".join(each["others"]),
                        )
                        for each in engine["decisions"]
                    ],
                )

    answer(shown, text)
