"""`fairgate audit follow`: keeps a server's last checkpoint, and fails unless the next one extends it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, Failure, answer
from ops.cli.config.target import read_key
from ops.cli.inspect.audit_log import FILE, PUBLIC_KEY, parsed_keys, text_of
from ops.cli.options import Number

if TYPE_CHECKING:
    from tenants.audit.note import PublicKey

TIMEOUT_S = 30.0
MAX_AGE_S = 120.0
"""Twice the setting audit.checkpoint_every, where nothing else is set."""


@click.command(cls=Command)
@click.option("--url", required=True, help="Server whose audit is followed.")
@click.option("--key-file", type=FILE, required=True, help="File with a key of scope admin:read.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File that keeps the last checkpoint; made at the first run.",
)
@click.option(
    "--max-age",
    type=Number(float, 0),
    default=MAX_AGE_S,
    show_default=True,
    help="Seconds that rows may wait unsigned: twice the server's audit.checkpoint_every.",
)
@PUBLIC_KEY
def follow(url: str, key_file: Path, state: Path, max_age: float, public_keys: tuple[str, ...]) -> None:
    """Fails unless the newest checkpoint of a server extends the one kept before, and keeps it; and where the
    rows after it wait longer than --max-age to be signed.

    Run it now and then, from a machine that the operator of the server does not control.

    \b
    --json answers:
      {"size": 1812, "before": 1700, "rows": 1815, "state": "audit.checkpoint"}
    """
    keys = parsed_keys(public_keys)
    if not keys:
        raise click.UsageError("--public-key is needed: `fairgate audit key` prints it")
    base, secret = url.rstrip("/"), read_key(key_file)
    found = _follow(base, secret, state, keys)
    _require_signing(base, secret, found["size"], found["rows"], max_age)
    answer(
        found,
        f"{found['size']:,} rows of {found['rows']:,} are signed, and extend the {found['before']:,} before",
    )


def _follow(url: str, secret: str, state: Path, keys: list[PublicKey]) -> dict[str, Any]:
    from tenants.audit.note import hash_of_text, open_checkpoint
    from tenants.audit.tree import is_consistent
    from tenants.errors import Invalid

    try:
        log = _get(url, secret, "/log", {})
        told, rows = log.get("checkpoint"), log.get("size")
        if not isinstance(told, dict) or not isinstance(told.get("note"), str):
            raise Failure(f"{url} has no checkpoint: its audit is not signed")
        new = open_checkpoint(told["note"], keys)
        if not isinstance(rows, int) or rows < new.size:
            raise Failure(f"the audit was cut off: {new.size:,} rows are signed, and it has {rows}")
        old = open_checkpoint(text_of(state), keys) if state.exists() else None
        if old is not None:
            if new.size < old.size:
                raise Failure(f"the audit was cut off: {old.size:,} rows were signed, now {new.size:,} are")
            answered = _get(url, secret, "/consistency", {"old": old.size, "new": new.size})
            proof = [hash_of_text("proof", str(digest)) for digest in answered.get("proof", ())]
            if not is_consistent(old.size, old.root, new.size, new.root, proof):
                raise Failure(
                    f"the audit was rewritten: the {new.size:,} rows that are signed now do not begin with"
                    f" the {old.size:,} of {state}; keep that file, it is the evidence"
                )
    except Invalid as error:
        raise Failure(str(error)) from None
    try:
        partial = state.with_name(state.name + ".partial")
        partial.write_text(told["note"], encoding="utf-8")
        partial.replace(state)
    except OSError as error:
        raise Failure(f"{state} cannot be written: {error.strerror}") from None
    before = 0 if old is None else old.size
    return {"size": new.size, "before": before, "rows": rows, "state": str(state)}


def _require_signing(url: str, secret: str, size: int, rows: int, max_age_s: float) -> None:
    """Fails where the first row that no checkpoint covers is older than that, by the clock here."""
    if rows == size:
        return
    try:
        [row] = _get(url, secret, "/entries", {"first": size, "limit": 1})["data"]
        age_s = time.time() - json.loads(row["entry"])["at_us"] / 1e6
    except (LookupError, TypeError, ValueError):
        raise Failure(f"row {size:,}, the first that is not signed, cannot be read: is it damaged?") from None
    if age_s > max_age_s:
        raise Failure(
            f"the audit is no longer signed: it has {rows:,} rows, its newest checkpoint speaks of {size:,},"
            f" and the first of the others waits for {age_s:,.0f} s; --max-age is {max_age_s:g} s"
        )


def _get(url: str, secret: str, path: str, query: dict[str, int]) -> dict[str, Any]:
    import httpx

    try:
        response = httpx.get(
            f"{url}/admin/v1/audit{path}",
            params=query,
            headers={"authorization": f"Bearer {secret}"},
            timeout=TIMEOUT_S,
        )
        answered = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Failure(f"the server at {url} does not answer: {str(error).rstrip('.')}") from None
    except ValueError:
        raise Failure(f"{url} answered without JSON: is this a Fairgate server?") from None
    match answered:
        case {"error": {"message": str() as message}} if response.is_error:
            raise Failure(f"{url} refuses: {message}")
        case dict() if response.is_success:
            return answered
    raise Failure(f"{url} answered {response.status_code}, and not as a Fairgate server does")
