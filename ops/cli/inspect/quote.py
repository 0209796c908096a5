"""`fairgate quote`: predicted wait, latency and cost of a request, by tier."""

from __future__ import annotations

from typing import Any

import click

from gateway.console.formats import exact_dollars
from ops.cli.base import Command, Failure, answer
from ops.cli.live import in_commands, running_server
from ops.cli.options import Number
from ops.reporting import table

TIMEOUT_S = 30.0


@click.command(cls=Command)
@click.argument("prompt", required=False)
@click.option(
    "--api-key",
    envvar="FAIRGATE_API_KEY",
    help="API key (also FAIRGATE_API_KEY).",
    metavar="KEY",
)
@click.option("--model", metavar="NAME", help="Model.  [default: the served one, if there is only one]")
@click.option("--prompt-tokens", type=Number(int, 1), help="Length of the prompt, instead of a prompt.")
@click.option("--max-tokens", type=Number(int, 1), help="Longest answer.  [default: what the context leaves]")
@click.option("--tier", metavar="NAME", help="Only this service tier.  [default: all that the key may use]")
@click.option("--url", metavar="URL", help="Server.  [default: the one that runs on the data directory]")
def quote(
    prompt: str | None,
    api_key: str | None,
    model: str | None,
    prompt_tokens: int | None,
    max_tokens: int | None,
    tier: str | None,
    url: str | None,
) -> None:
    """Asks what a request would wait, take and cost in each tier.

    Send the same request with a tier's token in the header X-Fairgate-Quote while it is valid: it is served
    in that tier at these prices, and credited if it takes longer than the p90.

    \b
      fairgate quote "count to ten" --max-tokens 50
      fairgate quote --prompt-tokens 4000 --tier batch --json
    --json answers what POST /v1/quotes does:
      {"object": "quote", "expires_at": 1767225610.0, "quotes": [{"tier": "standard", "wait_s": {"p50": 0.1,
       "p90": 0.4}, "ttft_s": {…}, "e2e_s": {…}, "cost_nanousd": {"p50": 900, "p90": 1500, "max": 4000},
       "tokens_ahead": {"own": 0, "others": 900, "higher_tier": 0}, "displaces": {"passes": 0, "pauses": 0},
       "token": "fgq1.…", …}, …]}
    """
    if (prompt is None) == (prompt_tokens is None):
        raise click.UsageError("give either a prompt or --prompt-tokens")
    if not api_key:
        raise click.UsageError(
            "a quote is for an API key: give --api-key or set FAIRGATE_API_KEY. A new key for an hour:"
            " fairgate key create --tenant NAME --expires-in 1h"
        )
    base = url.rstrip("/") if url is not None else _running()
    body: dict[str, Any] = {"model": model or _only_model(base, api_key)}
    given = {"prompt": prompt, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "service_tier": tier}
    body |= {name: value for name, value in given.items() if value is not None}
    offer = _ask("POST", f"{base}/v1/quotes", api_key, body)
    answer(offer, lambda: _print(offer))


def _print(offer: dict[str, Any]) -> None:
    rows = [
        (
            row["tier"],
            _pair(row["wait_s"]),
            _pair(row["ttft_s"]),
            _pair(row["e2e_s"]),
            f"{row['output_tokens']['p50']} / {row['output_tokens']['p90']}",
            " / ".join(f"${exact_dollars(row['cost_nanousd'][name])}" for name in ("p50", "p90", "max")),
            " / ".join(str(row["tokens_ahead"][cause]) for cause in ("own", "others", "higher_tier")),
            f"{row['displaces']['passes']} / {row['displaces']['pauses']}",
            "saturated" if row["saturated"] else row["basis"],
        )
        for row in offer["quotes"]
    ]
    columns = (
        "tier",
        "wait, s",
        "first token, s",
        "answer, s",
        "tokens",
        "cost, p50 / p90 / most",
        "ahead: own / others / higher",
        "passes / pauses",
        "basis",
    )
    table(f"{offer['model']}, {offer['input_tokens']} tokens of input; p50 / p90", columns, rows)
    click.echo(f"binding for {offer['valid_s']:g} s with the header X-Fairgate-Quote:")
    for row in offer["quotes"]:
        click.echo(f"  {row['tier']}: {row['token']}")
        if not row["binding"]:
            click.echo(f"    not binding: {row['not_binding']}")


def _pair(pair: dict[str, float]) -> str:
    return f"{pair['p50']:.3g} / {pair['p90']:.3g}"


def _running() -> str:
    server = running_server()
    if server is None:
        raise Failure("no server runs on this data directory: start one with `fairgate serve`, or name --url")
    return server.url


def _only_model(base: str, api_key: str) -> str:
    names = [str(row["id"]) for row in _ask("GET", f"{base}/v1/models", api_key)["data"]]
    if len(names) != 1:
        raise Failure(f"choose a model with --model: {', '.join(names) or 'this key may use none'}")
    return names[0]


def _ask(method: str, url: str, api_key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    import httpx

    try:
        response = httpx.request(
            method, url, headers={"authorization": f"Bearer {api_key}"}, json=body, timeout=TIMEOUT_S
        )
    except httpx.HTTPError as error:
        raise Failure(f"{url} does not answer: {error}") from None
    try:
        answer_: dict[str, Any] = response.json()
    except ValueError:
        raise Failure(
            f"{url} answered {response.status_code} without JSON: is this a Fairgate server?"
        ) from None
    if response.is_error:
        raise Failure(in_commands(str(answer_["error"]["message"])))
    return answer_
