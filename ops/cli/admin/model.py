"""`fairgate model`: served models, their replicas and aliases."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import click

from ops.cli.administer import administer
from ops.cli.base import answer, group, settings_now
from ops.cli.live import call, running_server
from ops.reporting import table


@group()
def model() -> None:
    """Models and aliases, ours and those of other servers.

    \b
      fairgate model list
      fairgate model check
    """


@model.command(name="list")
def list_() -> None:
    """Lists every model name of the API, and what serves it.

    \b
    While a server runs here, also what each server can do beyond plain text. --json answers:
      [{"name": "big", "kind": "alias", "means": {"meta/llama": 1}, "replicas": [], "priced": true,
        "can": {}}, {"name": "meta/llama", "kind": "model", "means": {}, "replicas": ["llama-a"],
        "priced": true, "can": {"llama-a": ["text", "tools"]}}, …]
    """
    from ops.serving.upstream_probe import can
    from tenants.directory import queries
    from tenants.nouns.alias import alias_as_json

    settings = settings_now()
    priced = {row.model for row in administer(lambda admin: admin.prices.all())}
    stored = administer(lambda admin: admin.transactions.read(queries.aliases_of_models))
    rows: list[dict[str, Any]] = []
    for name in settings.pool_names:
        replicas = [upstream.name for upstream in settings.upstreams if upstream.pool_name == name]
        if settings.engine.serve and name == settings.served_model_name:
            replicas.insert(0, "engine")
        rows.append({"name": name, "kind": "model", "means": {}, "replicas": replicas})
    for name, means in (settings.aliases | stored).items():
        rows.append({"name": name, "kind": "alias", "means": alias_as_json(means), "replicas": []})
    able = _able()
    for row in rows:
        row["can"] = {name: able[name]["capabilities"] for name in row["replicas"] if name in able}
        chain = row["means"].get("chain")  # each of its models has its own price
        row["priced"] = priced.issuperset(chain if isinstance(chain, list) else [row["name"]])
    cells = [
        (
            row["name"],
            row["kind"],
            ", ".join(row["replicas"]) or _means(row["means"]),
            "; ".join(f"{name}: {can(able[name])}" for name in row["can"]),
            "yes" if row["priced"] else "no: refused until `fairgate price set`",
        )
        for row in rows
    ]
    answer(rows, lambda: table("models", ("name", "kind", "behind it", "can do", "priced"), cells))


def _able() -> dict[str, dict[str, Any]]:
    """The servers as the running gateway describes them, by name; empty without one."""
    server = running_server()
    if server is None:
        return {}
    pools = call(server, "GET", "/status")["models"]["pools"].values()
    return {
        "engine" if replica["kind"] == "engine" else replica["replica_id"]: replica
        for pool in pools
        for replica in pool["replicas"]
    }


def _means(means: dict[str, Any]) -> str:
    chain = means.get("chain")
    if isinstance(chain, list):
        return f"{', else '.join(chain)} (max_price {means['max_price']:g})"
    return ", ".join(f"{pool} ({weight})" for pool, weight in means.items())


@model.command()
def check() -> None:
    """Checks that every other server serves the model that the settings expect, correctly.

    \b
    Sends one GET /v1/models to each, reads its Prometheus page where one is named, and asks for two answers
    of 8 tokens: a server must stop there, and count what it sends. Where its prefix cache is salted, three
    more show whether it keeps tenants apart. One token each shows what else it can do (tools, JSON schemas,
    reasoning, images, fields of its own, embeddings), where the settings do not say it. Of Fairgate's plug-in
    in a vLLM it says the version and what holds there. Exit code 1 when something is wrong. --json answers:
      [{"name": "llama-a", "url": "http://10.0.0.5:8000/v1", "model": "meta/llama", "ok": false,
        "detail": "it does not answer: Connection refused"}, …]
    """
    findings = asyncio.run(_check())
    healthy = all(finding["ok"] for finding in findings)

    def text() -> None:
        if not findings:
            click.echo("no other servers: the setting upstreams names none")
        for finding in findings:
            mark = click.style("ok  ", fg="green") if finding["ok"] else click.style("FAIL", fg="red")
            click.echo(f"{mark}  {finding['name']} ({finding['url']}): {finding['detail']}")

    answer(findings, text)
    sys.exit(0 if healthy else 1)


async def _check() -> Sequence[dict[str, Any]]:
    from gateway.pools.catalogue import Catalogue
    from gateway.requests.prompt import TokenizerMissing
    from ops.serving.upstream_pools import renderer_of, upstream_of
    from ops.serving.upstream_probe import can, cannot, faults_of, plugin_detail, plugin_faults
    from tenants.errors import Invalid

    settings = settings_now()
    findings: list[dict[str, Any]] = []
    for server in settings.upstreams:
        finding = {"name": server.name, "url": server.url, "model": server.model, "ok": False, "detail": ""}
        findings.append(finding)
        try:
            renderer = renderer_of(server)
            # Not this gateway's id: its plug-in would take the check for another life of the gateway.
            upstream = upstream_of(server, os.environ, renderer, gateway_id=f"check_{secrets.token_hex(8)}")
        except (Invalid, TokenizerMissing) as error:
            finding["detail"] = str(error)
            continue
        try:
            await upstream.probe()
            finding["ok"] = upstream.is_up
            context_tokens = upstream.ready.model.context_tokens if upstream.ready else 0
            finding["detail"] = upstream.describe()["refusal"] or (
                f"serves {server.model}, {context_tokens} tokens of context, prompts"
                f" {'counted' if server.tokenizer_dir else 'estimated: no tokenizer_dir'}, prefix cache"
                f" {upstream.describe()['prefix_cache']}"
            )
            if finding["ok"]:
                await upstream.monitor.trials.try_all()
                shown = upstream.describe()
                refused = cannot(shown)
                finding["detail"] = "; ".join(
                    [
                        str(finding["detail"]),
                        f"of the kind {shown['server']} it can do {can(shown)}",
                        *([f"it refuses {refused}"] if refused else []),
                    ]
                )
            if finding["ok"] and server.metrics_path and not await upstream.monitor.read_metrics():
                finding |= {
                    "ok": False,
                    "detail": f"{server.metrics_path} is no Prometheus page of a server known here",
                }
            faults = await faults_of(upstream, renderer) if finding["ok"] else []
            if finding["ok"] and upstream.link.has_plugin:
                await upstream.probe()
                finding["detail"] = f"{finding['detail']}, {plugin_detail(upstream.describe())}"
                faults += plugin_faults(upstream.describe(), server.max_concurrent)
            if faults:
                finding |= {"ok": False, "detail": "; ".join(faults)}
        finally:
            await upstream.close()
    try:
        Catalogue(settings.pool_names, settings.aliases)
    except Invalid as error:
        findings.append({"name": "aliases", "url": "", "model": "", "ok": False, "detail": str(error)})
    return findings
