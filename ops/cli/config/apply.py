"""`fairgate apply`: makes the directory as a configuration file says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from ops.cli.base import Command, Failure, answer
from ops.cli.config.target import FILE, read_config, remote_options, show_plan, target_of


@click.command(cls=Command)
@FILE
@click.option("--dry-run", is_flag=True, help="Only show it: it is done and undone in one transaction.")
@click.option(
    "--secrets-out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="New file, for its owner only, for the secrets of keys that are made. Needed where some are.",
)
@remote_options
def apply(
    path: Path, dry_run: bool, secrets_out: Path | None, url: str | None, key_file: Path | None
) -> None:
    """Applies a configuration file, all of it or nothing.

    \b
      fairgate diff -f fairgate.yaml
      fairgate apply -f fairgate.yaml --secrets-out keys.json
    If something changed after the plan was computed, nothing is applied. Only things that the file names with
    `state: absent` are removed. Each step is audited.
    --json answers what `fairgate diff` answers, with the new keys, without their secrets:
      {"object": "config.plan", "revision": 17, …, "keys": [{"tenant": "acme", "name": "web", "id": "key_…"}],
       "dry_run": false}
    """
    target, file = target_of(url, key_file), read_config(path)
    plan = target.plan(file)
    if dry_run:
        shown = target.apply(file, plan["etag"], is_dry_run=True) | {"dry_run": True}
        answer(shown, lambda: show_plan(shown))
        return
    makes_keys = any(step["act"] == "key.create" for step in plan["steps"])
    if makes_keys and secrets_out is None:
        raise Failure(
            "the file names keys that are not there yet: say with --secrets-out FILE where their secrets go;"
            " they cannot be read again"
        )
    if secrets_out is None or not makes_keys:
        done = target.apply(file, plan["etag"], is_dry_run=False)
    else:
        done = _with_secrets(secrets_out, lambda: target.apply(file, plan["etag"], is_dry_run=False))
    shown = done | {"dry_run": False, "keys": [_without_secret(key) for key in done["keys"]]}
    answer(shown, lambda: show_plan(shown))


def _with_secrets(path: Path, act: Any) -> dict[str, Any]:
    """Opens the file before the act, so that a file that cannot be written makes no key."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise Failure(f"--secrets-out {path} cannot be created: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as opened:
        try:
            done: dict[str, Any] = act()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        try:
            json.dump(done["keys"], opened, indent=2)
            opened.write("\n")
            opened.flush()
            os.fsync(opened.fileno())
        except OSError as error:
            ids = ", ".join(key["id"] for key in done["keys"])
            raise Failure(
                f"all was done, but {path} was not written ({error.strerror}): give the keys new secrets with"
                f" `fairgate key rotate`: {ids}"
            ) from None
    return done


def _without_secret(key: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name != "key"}
