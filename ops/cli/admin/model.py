"""`fairgate model`: served models, their replicas and aliases."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ops.cli.admin.administer import administer
from ops.cli.base import answer, group, settings_now
from ops.reporting import table


@group()
def model() -> None:
    """Models: our own engine's, those of other servers (setting upstreams), and aliases.

    \b
      fairgate model list
      fairgate model check
    """


@model.command(name="list")
def list_() -> None:
    """Lists every name that a model has in the API, and what stands behind it.

    \b
    --json answers:
      [{"name": "big", "kind": "alias", "means": {"meta/llama": 1}, "replicas": [], "priced": true},
       {"name": "meta/llama", "kind": "model", "means": {}, "replicas": ["llama-a"], "priced": true}, …]
    """
    from gateway.pools.catalogue import alias_as_json

    settings = settings_now()
    priced = {row.model for row in administer(lambda admin: admin.list_prices())}
    rows: list[dict[str, Any]] = []
    for name in settings.pool_names:
        replicas = [each.name for each in settings.upstreams if each.pool_name == name]
        if settings.engine.serve and name == settings.served_model_name:
            replicas.insert(0, "engine")
        rows.append({"name": name, "kind": "model", "means": {}, "replicas": replicas})
    for name, means in settings.aliases.items():
        rows.append({"name": name, "kind": "alias", "means": alias_as_json(means), "replicas": []})
    for row in rows:
        chain = row["means"].get("chain")  # each of its models has its own price
        row["priced"] = priced.issuperset(chain if isinstance(chain, list) else [row["name"]])
    cells = [
        (
            row["name"],
            row["kind"],
            ", ".join(row["replicas"]) or _means(row["means"]),
            "yes" if row["priced"] else "no: refused until `fairgate price set`",
        )
        for row in rows
    ]
    answer(rows, lambda: table("models", ("name", "kind", "behind it", "priced"), cells))


def _means(means: dict[str, Any]) -> str:
    chain = means.get("chain")
    if isinstance(chain, list):
        return f"{', else '.join(chain)} (max_price {means['max_price']:g})"
    return ", ".join(f"{pool} ({weight})" for pool, weight in means.items())


@model.command()
def check() -> None:
    """Asks every other server whether it serves the model that the settings expect of it.

    \b
    Sends one GET /v1/models to each, and reads its Prometheus page where one is named. Exit code 1 when
    something is wrong. --json answers:
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
    from tenants.errors import Invalid

    settings = settings_now()
    findings: list[dict[str, Any]] = []
    for each in settings.upstreams:
        finding = {"name": each.name, "url": each.url, "model": each.model, "ok": False, "detail": ""}
        findings.append(finding)
        try:
            upstream = upstream_of(each, os.environ, renderer_of(each))
        except (Invalid, TokenizerMissing) as error:
            finding["detail"] = str(error)
            continue
        try:
            await upstream.probe()
            finding["ok"] = upstream.is_up
            found = upstream.model
            finding["detail"] = upstream.describe()["refusal"] or (
                f"serves {each.model}, {found.context_tokens if found else 0} tokens of context, prompts"
                f" {'counted' if each.tokenizer_dir else 'estimated: no tokenizer_dir'}"
            )
            if finding["ok"] and each.metrics_path and not await upstream.read_metrics():
                finding |= {
                    "ok": False,
                    "detail": f"{each.metrics_path} is no Prometheus page of a server known here",
                }
        finally:
            await upstream.close()
    try:
        Catalogue(settings.pool_names, settings.aliases)
    except Invalid as error:
        findings.append({"name": "aliases", "url": "", "model": "", "ok": False, "detail": str(error)})
    return findings
