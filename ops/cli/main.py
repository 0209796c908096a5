"""The command `fairgate`: its groups and commands, each imported on first use."""

from __future__ import annotations

import os

import click

from ops.cli.base import Group, served_resources
from tenants.release import this_release

SECTIONS = {
    "Run": (
        *("run.serve", "run.demo", "run.doctor", "run.engine", "run.db", "run.backup", "run.restore"),
        "run.place",
    ),
    "Administer": (
        *("admin.tenant", "project", "admin.key", "admin.limit", "admin.slo", "admin.brake"),
        *("admin.model", "alias", "admin.upstream", "admin.person", "admin.webhook", "inspect.audit"),
        *("config.export", "config.diff", "config.apply"),
    ),
    "Watch": (
        *("inspect.status", "inspect.top", "inspect.request", "refusal", "flow", "config.alerts"),
        "inspect.forecast",
    ),
    "Money": ("admin.usage", "admin.price", "inspect.quote", "inspect.ledger"),
    "Policy": ("policy.policy", "simulate.whatif", "simulate.simulate"),
    "Develop": ("run.completion", "run.plugin", "bench"),
}
"""Of `fairgate --help`: each command with its module; without one it is a resource's, which needs none."""
OWN = {
    path.rpartition(".")[2]: f"ops.cli.{path}:{path.rpartition('.')[2]}" if "." in path else ""
    for paths in SECTIONS.values()
    for path in paths
} | {"bench": "ops.cli.bench.main:bench"}


class Root(Group):
    """The command, with a group for each resource that has no module of its own."""

    def _nouns(self) -> dict[str, Group]:
        from ops.cli.resource_commands import groups

        own = self.lazy
        return groups(one for one in served_resources(self) if not (own.get(one.name) or own.get(one.plural)))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*dict.fromkeys([*super().list_commands(ctx), *self._nouns()])]

    def sections(self, ctx: click.Context) -> dict[str, list[str]]:
        """A resource that is in none of them is administered."""
        named = {heading: [path.rpartition(".")[2] for path in paths] for heading, paths in SECTIONS.items()}
        named["Administer"] += [name for name in self.list_commands(ctx) if name not in OWN]
        return named

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if self.lazy.get(cmd_name):
            return super().get_command(ctx, cmd_name)
        return self._nouns().get(cmd_name)


@click.group(
    cls=Root,
    lazy=OWN,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(this_release(), prog_name="fairgate")
def cli() -> None:
    """Shares GPUs that serve language models between tenants.

    \b
    Start here:
      fairgate demo                              see it work: 27 tenants, one small model
      fairgate serve                             gateway and engine on http://127.0.0.1:8000
      fairgate tenant create acme --weight 2     a tenant with a double share
      fairgate key create --tenant acme          its API key, shown once
      fairgate limit set --tenant acme --meter total_tokens --window day --amount 1m
      fairgate status                            is it ready, what waits, what is refused
      fairgate top                               the same, live
      fairgate brake --tier batch --share 10% --for 30m
      fairgate doctor                            what is wrong, and how to fix it

    Numbers may be written as 1000000, 1,000,000, 1m or 1.5k, and shares as 0.1 or 10%. Settings come from
    flags, environment variables (FAIRGATE_*) and a TOML file (--config), in that order.

    Exit codes: 0 success, 1 failed, 2 wrong usage.
    """


def main() -> None:
    """Console script `fairgate`. What it writes (exports, databases, logs) is for its user only."""
    os.umask(0o077)
    cli.main(prog_name="fairgate")


if __name__ == "__main__":
    main()
