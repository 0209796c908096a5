"""`fairgate export`: the directory as a configuration file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ops.cli.base import Command, answer, served_resources
from ops.cli.config.target import remote_options, target_of


@click.command(cls=Command)
@remote_options
@click.option("--schema", is_flag=True, help="The JSON Schema of the file instead, for editors.")
def export(url: str | None, key_file: Path | None, schema: bool) -> None:
    """Writes the configuration as a YAML file.

    Tenants, projects, keys by name, limits, prices, targets and the stored policy.

    \b
      fairgate export > fairgate.yaml
      fairgate export --schema > fairgate.schema.json
    The same state always gives the same file. It never contains secrets. Keys without a name and their limits
    are left out and listed on stderr; overrides and brakes are left out.
    --json answers:
      {"object": "config", "revision": 17, "config": {"version": 1, "tenants": [{"name": "acme", …}]},
       "left_out": ["acme: key key_…: it has no name"]}
    """
    import msgspec

    from tenants.config_file.document import configuration_type, json_schema
    from tenants.config_file.export import as_yaml

    if schema:
        click.echo(json.dumps(json_schema(served_resources()), indent=2))
        return
    exported = target_of(url, key_file).export()
    text = as_yaml(msgspec.convert(exported["config"], configuration_type(served_resources())))
    answer(exported, lambda: click.echo(text, nl=False))
    for name in exported["left_out"]:
        click.echo(f"left out: {name}", err=True)
