"""The command `fairgate`: its groups and commands, each imported on first use."""

from __future__ import annotations

import os
from importlib import metadata

import click

from ops.cli.base import Group, served_resources


def _version() -> str:
    try:
        return metadata.version("fairgate")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0+unknown"


OWN = {
    path.rpartition(".")[2]: f"ops.cli.{path}:{path.rpartition('.')[2]}" if "." in path else ""
    for path in (
        *("run.serve", "run.demo", "run.engine", "run.db"),
        *("inspect.top", "inspect.status", "admin.tenant", "project", "admin.key", "admin.limit"),
        *("admin.slo", "admin.person", "admin.brake", "inspect.request", "refusal"),
        *("flow", "inspect.quote", "inspect.audit"),
        *("admin.price", "admin.model", "admin.upstream", "admin.usage", "admin.webhook"),
        *("inspect.ledger", "policy.policy", "inspect.forecast"),
        *("config.export", "config.diff", "config.apply", "config.alerts"),
        *("simulate.simulate", "simulate.whatif", "run.doctor", "run.plugin", "run.place"),
    )
} | {"bench": "ops.cli.bench.main:bench"}
"""In the order of `fairgate --help`, each with its module; empty: a resource's, which needs none."""


class Root(Group):
    """The command, with a group for each resource that has no module of its own."""

    def _nouns(self) -> dict[str, Group]:
        from ops.cli.resource_commands import groups

        own = self.lazy
        return groups(one for one in served_resources(self) if not (own.get(one.name) or own.get(one.plural)))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*dict.fromkeys([*super().list_commands(ctx), *self._nouns()])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if self.lazy.get(cmd_name):
            return super().get_command(ctx, cmd_name)
        return self._nouns().get(cmd_name)


@click.group(
    cls=Root,
    lazy=OWN,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(_version(), prog_name="fairgate")
def cli() -> None:
    """Shares a language model between tenants by explicit contract.

    \b
    Start here:
      fairgate demo                              see it work: 27 tenants, one small model
      fairgate serve                             gateway and engine on http://127.0.0.1:8000
      fairgate tenant create acme --weight 2     a tenant with a double share
      fairgate key create --tenant acme          its API key, shown once
      fairgate limit set --tenant acme --meter total_tokens --window day --amount 1000000
      fairgate top                               who waits, runs and gets which share, live
      fairgate status                            what an operator reads first
      fairgate brake --tier batch --share 0.1 --for 30m
      fairgate doctor                            what is wrong, and what to do

    Settings come from flags, environment variables (FAIRGATE_*) and one TOML file (--config), in that
    order. Exit codes: 0 done, 1 failed, 2 asked wrongly.
    """


def main() -> None:
    """Console script `fairgate`. What it writes (exports, databases, logs) is for its user only."""
    os.umask(0o077)
    cli.main(prog_name="fairgate")


if __name__ == "__main__":
    main()
