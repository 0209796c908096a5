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
    from tenants.audit.key_history import SignerChange
    from tenants.audit.note import Checkpoint, PublicKey

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
    "--accept-restore",
    is_flag=True,
    help="Go on with a log that was restored without rows that were seen here, or without its old key.",
)
@click.option(
    "--max-age",
    type=Number(float, 0),
    default=MAX_AGE_S,
    show_default=True,
    help="Seconds that rows may wait unsigned: twice the server's audit.checkpoint_every.",
)
@PUBLIC_KEY
def follow(
    url: str,
    key_file: Path,
    state: Path,
    accept_restore: bool,
    max_age: float,
    public_keys: tuple[str, ...],
) -> None:
    """Fails unless the newest checkpoint of a server extends the one kept before, and keeps it; and where the
    rows after it wait longer than --max-age to be signed.

    Run it now and then, from a machine that the operator of the server does not control. It goes on with a
    log that was restored and has all rows seen here. Where it has not, it names them, until --accept-restore,
    which keeps the file of --state under another name.

    \b
    --json answers:
      {"size": 1812, "before": 1700, "rows": 1815, "state": "audit.checkpoint", "kept": null}
    """
    keys = parsed_keys(public_keys)
    if not keys:
        raise click.UsageError("--public-key is needed: `fairgate audit key` prints it")
    base, secret = url.rstrip("/"), read_key(key_file)
    found = _follow(base, secret, state, keys, accept_restore)
    _require_signing(base, secret, found["size"], found["rows"], max_age)
    answer(
        found,
        f"{found['size']:,} rows of {found['rows']:,} are signed, and extend the {found['before']:,} before"
        + (f"; what was followed until now is in {found['kept']}" if found["kept"] else ""),
    )


def _follow(url: str, secret: str, state: Path, keys: list[PublicKey], accepts: bool) -> dict[str, Any]:
    from tenants.audit.note import claimed_checkpoint, hash_of_text, open_checkpoint
    from tenants.audit.tree import is_consistent
    from tenants.errors import Invalid

    try:
        log = _get(url, secret, "/log", {})
        told, rows = log.get("checkpoint"), log.get("size")
        if not isinstance(told, dict) or not isinstance(told.get("note"), str):
            raise Failure(f"{url} has no checkpoint: its audit is not signed")
        seen = text_of(state) if state.exists() else None
        names = {claimed_checkpoint(note).origin for note in (told["note"], seen) if note is not None}
        is_one_log = len(names) == 1 and names <= {key.name for key in keys}
        restores = [] if is_one_log else _restores(url, secret, keys)
        keys = [*keys, *(change.new for change, _ in restores)]
        new = open_checkpoint(told["note"], keys)
        if not isinstance(rows, int) or rows < new.size:
            raise Failure(f"the audit was cut off: {new.size:,} rows are signed, and it has {rows}")
        old, kept = None if seen is None else open_checkpoint(seen, keys), None
        if old is not None and old.origin != new.origin:
            kept = state.with_name(f"{state.name}.{old.size}-rows")
            old = _extended(old, restores, state, accepts)
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
        if kept is not None and (not kept.exists() or text_of(kept) != seen):
            with kept.open("x", encoding="utf-8") as file:
                file.write(seen or "")
        partial = state.with_name(state.name + ".partial")
        partial.write_text(told["note"], encoding="utf-8")
        partial.replace(state)
    except OSError as error:
        raise Failure(f"{error.filename} cannot be written: {error.strerror}") from None
    return {
        "size": new.size,
        "before": 0 if old is None else old.size,
        "rows": rows,
        "state": str(state),
        "kept": None if kept is None else str(kept),
    }


def _restores(url: str, secret: str, keys: list[PublicKey]) -> list[tuple[SignerChange, Checkpoint]]:
    """Those that a known key leads to, each with the checkpoint that ends with its row."""
    from tenants.audit.key_history import KeyHistory, change_of
    from tenants.audit.note import claimed_checkpoint

    try:
        rows = _get(url, secret, "", {"act": "audit"})["data"]
        changes = [change for row in reversed(rows) if (change := change_of(row)) is not None]
        notes = {}
        for change in changes:
            for made in _get(url, secret, "/checkpoints", {"after": change.seq, "limit": 1})["data"]:
                notes[made["size"]] = str(made["note"])
        signed = KeyHistory(keys, changes, notes).changes
        return [(one, claimed_checkpoint(notes[one.size])) for one in signed if one.is_restore]
    except (LookupError, TypeError, ValueError):
        raise Failure(
            f"{url} answered, and not as a Fairgate server does, what it was restored from"
        ) from None


def _extended(
    old: Checkpoint, restores: list[tuple[SignerChange, Checkpoint]], state: Path, accepts: bool
) -> Checkpoint:
    """What the restored log has to extend. Fails where it lacks rows, or the old key's word, and that is not
    accepted: then it has to extend the checkpoint of the restore."""
    own = [each for each in restores if each[0].old.name == old.origin] or restores[-1:]
    if not own:
        raise Failure(f"this is another log than {old.origin} of {state}, and no restore leads to it")
    change, checkpoint = own[0]
    lacks = old.size > change.seq
    if lacks:
        what = f"its rows {change.seq:,} to {old.size - 1:,} were seen here, and are lost"
    else:
        what = "its old key is lost, and does not vouch for the new one"
    if (lacks or not change.is_by_both) and not accepts:
        raise Failure(
            f"the audit was restored from a backup: {what}; ask the operator what was done in that time;"
            f" --accept-restore goes on, and keeps {state} beside"
        )
    return checkpoint if lacks else old


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


def _get(url: str, secret: str, path: str, query: dict[str, int | str]) -> dict[str, Any]:
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
