"""`fairgate audit follow`: keeps a server's last checkpoint, and fails unless the next one extends it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, Failure, answer
from ops.cli.config.target import read_key
from ops.cli.inspect.audit_log import FILE, PUBLIC_KEY, parsed_keys, text_of

if TYPE_CHECKING:
    from tenants.audit.note import PublicKey

TIMEOUT_S = 30.0


@click.command(cls=Command)
@click.option("--url", required=True, help="Server whose audit is followed.")
@click.option("--key-file", type=FILE, required=True, help="File with a key of scope admin:read.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File that keeps the last checkpoint; made at the first run.",
)
@PUBLIC_KEY
def follow(url: str, key_file: Path, state: Path, public_keys: tuple[str, ...]) -> None:
    """Fails unless the newest checkpoint of a server extends the one kept before, and keeps it.

    Run it now and then, from a machine that the operator of the server does not control.

    \b
    --json answers:
      {"size": 1812, "before": 1700, "state": "audit.checkpoint"}
    """
    keys = parsed_keys(public_keys)
    if not keys:
        raise click.UsageError("--public-key is needed: `fairgate audit key` prints it")
    found = _follow(url.rstrip("/"), read_key(key_file), state, keys)
    answer(found, f"{found['size']:,} rows, which extend the {found['before']:,} of before")


def _follow(url: str, secret: str, state: Path, keys: list[PublicKey]) -> dict[str, Any]:
    from tenants.audit.note import hash_of_text, open_checkpoint
    from tenants.audit.tree import is_consistent
    from tenants.errors import Invalid

    try:
        told = _get(url, secret, "/log", {}).get("checkpoint")
        if not isinstance(told, dict) or not isinstance(told.get("note"), str):
            raise Failure(f"{url} has no checkpoint: its audit is not signed")
        new = open_checkpoint(told["note"], keys)
        old = open_checkpoint(text_of(state), keys) if state.exists() else None
        if old is not None:
            if new.size < old.size:
                raise Failure(f"the audit was cut off: {old.size:,} rows were signed, now {new.size:,} are")
            answered = _get(url, secret, "/consistency", {"old": old.size, "new": new.size})
            proof = [hash_of_text("proof", str(each)) for each in answered.get("proof", ())]
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
    return {"size": new.size, "before": 0 if old is None else old.size, "state": str(state)}


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
