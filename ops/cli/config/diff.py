"""`fairgate diff`: how the directory differs from a configuration file."""

from __future__ import annotations

from pathlib import Path

import click

from ops.cli.base import Command, Failure, answer
from ops.cli.config.target import FILE, read_config, remote_options, show_plan, target_of

DIFFERENT = 1


class Trouble(click.ClickException):
    """No difference can be told: exit code 2."""

    exit_code = 2


@click.command(cls=Command)
@FILE
@remote_options
def diff(path: Path, url: str | None, key_file: Path | None) -> None:
    """Shows what `fairgate apply` would change.

    \b
      fairgate diff -f fairgate.yaml
    Exit code 0: no difference; 1: differences; 2: the file or the installation cannot be read. Things that
    the file does not name stay as they are and do not count as differences; they are listed.
    --json answers:
      {"object": "config.plan", "revision": 17, "etag": "…", "steps": [{"act": "tenant.update",
       "subject": "tenant acme", "tenant": "acme", "changes": {"weight": {"before": 1.0, "after": 2.0}}}],
       "unnamed": ["tenant beta"]}
    """
    try:
        plan = target_of(url, key_file).plan(read_config(path))
    except Failure as failure:
        raise Trouble(failure.message) from None
    answer(plan, lambda: show_plan(plan))
    if plan["steps"]:
        click.get_current_context().exit(DIFFERENT)
