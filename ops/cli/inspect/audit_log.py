"""`fairgate audit checkpoint | prove | key`: the audit as a log that is signed."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ops.cli.administer import actor, administer
from ops.cli.base import Command, Failure, answer, group, json_option, settings_now
from ops.cli.options import Number

if TYPE_CHECKING:
    from tenants.admin.admin import Admin
    from tenants.audit.note import PublicKey, SigningKey

MAX_FILE_BYTES = 1_000_000
PAGE = 1_000

FILE = click.Path(path_type=Path, dir_okay=False)
PUBLIC_KEY = click.option(
    "--public-key",
    "public_keys",
    metavar="KEY",
    multiple=True,
    help="The log's public key, as `fairgate audit key` prints it. From elsewhere than the log, or it proves"
    " nothing. More than once: after a change of the key.",
)


@click.command(cls=Command)
def checkpoint() -> None:
    """Signs the audit now, with a digest of the ledger up to now, and prints the checkpoint.

    It needs the key in the data directory. Keep the checkpoint where the operator of the server cannot change
    it: `fairgate audit verify --checkpoint FILE` finds rows that were cut off since, or that were changed by
    one who has the key.

    \b
    --json answers:
      {"size": 1812, "note": "fairgate-audit/…\\n1812\\n…", "public_key": "fairgate-audit/…+…+…"}
    """
    key = signing_key()
    if key is None:
        raise Failure("there is no audit-key in the data directory: the gateways that have it sign the audit")

    async def sign(admin: Admin) -> dict[str, Any]:
        await admin.ledger.digest()
        made = await admin.transactions.audit_log(key).make_checkpoint()
        return {"size": made.size, "note": made.note, "public_key": str(key.public)}

    signed = administer(sign)
    answer(signed, signed["note"].rstrip("\n"))


@click.command(cls=Command)
@click.argument("seq", type=Number(int, 0))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
def prove(seq: int, output: Path | None) -> None:
    """Writes a proof that row SEQ is in the audit: a C2SP tlog-proof, with the row and a checkpoint.

    Anybody with the public key can check it without the other rows:
    `fairgate audit verify --proof FILE --public-key KEY`.

    \b
    --json answers:
      {"seq": 17, "proof": "c2sp.org/tlog-proof@v1\\n…"}
    """

    async def found(admin: Admin) -> str:
        return (await admin.transactions.audit_log().prove(seq)).text

    text = administer(found)
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise Failure(f"{output} cannot be written: {error.strerror}") from None
    answer({"seq": seq, "proof": text}, f"written to {output}" if output else text.rstrip("\n"))


@group(invoke_without_command=True)
@click.pass_context
def key(context: click.Context) -> None:
    """Prints the public key that the audit is signed with: give it to auditors.

    \b
      fairgate audit key
      fairgate audit key make         the key of a new log, before its first server starts
      fairgate audit key rotate       signs with a new one from now on
    --json answers:
      {"public_key": "fairgate-audit/…+…+…", "signs_here": true}
    """
    if context.invoked_subcommand is not None:
        return

    async def found(admin: Admin) -> PublicKey | None:
        return (await admin.transactions.audit_log().state()).public_key

    own, known = signing_key(), administer(found)
    if known is None:
        raise Failure("the audit was not signed yet: `fairgate serve` makes the key")
    signs_here = own is not None and own.public == known
    answer({"public_key": str(known), "signs_here": signs_here}, str(known))


key.params.append(json_option())  # a group has none of its own


@key.command()
def make() -> None:
    """Makes the key of a new log in the data directory: the first server that starts with it signs with it.

    For gateways with data directories of their own, which need a copy each. Asks no database.

    \b
    --json answers:
      {"public_key": "fairgate-audit/…+…+…", "file": "…/audit-key"}
    """
    from ops.serving import audit_key, datadir

    directory, made = settings_now().data_dir, audit_key.of_new_log()
    path = directory / audit_key.AUDIT_KEY_FILE
    try:
        datadir.ensure(directory)
        datadir.private_file(path, made.to_secret_text())
    except datadir.DataDirRefused as error:
        raise Failure(str(error)) from None
    except FileExistsError:
        raise Failure(f"{path} is there already: `fairgate audit key rotate` changes the key") from None
    answer({"public_key": str(made.public), "file": str(path)}, f"{made.public}\nmade {path}")


@key.command()
def rotate() -> None:
    """Signs the audit with a new key from now on, and replaces the one in the data directory.

    A row of the audit names both keys, and the checkpoint that ends with it is signed by both: who knows one
    of them can check what the other one signed. The old key signs nothing any more. Running gateways go on
    with the new one; those with a data directory of their own need a copy of the file audit-key.

    \b
    --json answers:
      {"public_key": "fairgate-audit/…+…+…", "before": "fairgate-audit/…+…+…", "size": 1813,
       "note": "fairgate-audit/…\\n1813\\n…"}
    """
    from ops.serving import audit_key, datadir

    own = signing_key()
    if own is None:
        raise Failure("there is no audit-key in the data directory: only who has it can change it")
    who = actor()

    async def change(admin: Admin) -> dict[str, Any]:
        log = admin.transactions.audit_log(own)
        made = await audit_key.change(settings_now().data_dir, who.name, who.origin, log)
        return {"public_key": str(await log.public_key()), "before": str(own.public)} | {
            "size": made.size,
            "note": made.note,
        }

    try:
        signed = administer(change)
    except datadir.DataDirRefused as error:
        raise Failure(str(error)) from None
    answer(
        signed, f"{signed['public_key']}\nsigns from row {signed['size']} on, in place of\n{signed['before']}"
    )


def signing_key() -> SigningKey | None:
    from ops.serving import audit_key, datadir

    try:
        return audit_key.read(settings_now().data_dir)
    except datadir.DataDirRefused as error:
        raise Failure(str(error)) from None


def parsed_keys(texts: Sequence[str]) -> list[PublicKey]:
    from tenants.audit.note import PublicKey
    from tenants.errors import Invalid

    try:
        return [PublicKey.parse(text) for text in texts]
    except Invalid as error:
        raise click.UsageError(f"--public-key: {error.message}") from None


async def write_log(file: TextIO, admin: Admin, own: SigningKey | None) -> int:
    """Writes the whole log, signed up to now where the key is here; returns the number of rows."""
    from tenants.audit.export import ExportHead, checkpoint_line, head_line, row_line
    from tenants.audit.persons import MARK
    from tenants.errors import AuditDamaged, Invalid

    log = admin.transactions.audit_log(own)
    if log.can_sign:
        try:
            await log.make_checkpoint()
        except (AuditDamaged, Invalid) as error:
            click.echo(f"not signed up to now: {error}", err=True)
    state, seq, signed = await log.state(), 0, -1
    known, root = state.public_key, base64.b64encode(state.root).decode()
    file.write(head_line(ExportHead(None if known is None else str(known), state.size, root)))
    while rows := await log.rows(seq, min(PAGE, state.size - seq)):
        names = await admin.with_names({"tenant_id": row.fields["tenant_id"]} for row in rows)
        for row, name in zip(rows, names, strict=True):
            about = row.fields["after"] or row.fields["before"] or {}
            called = str(about.get("name") or "")
            shown = {"target_name": "" if called.startswith(MARK) else called, "tenant": name["tenant"]}
            file.write(row_line(row, shown))
        seq = rows[-1].seq + 1
    while notes := await log.checkpoints(signed):
        for note in notes:
            if note.size <= state.size:
                file.write(checkpoint_line(note.size, note.note))
        signed = notes[-1].size
    return seq


def text_of(path: Path) -> str:
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise Failure(f"{path} has more than {MAX_FILE_BYTES:,} bytes: it is no checkpoint and no proof")
        return data.decode()
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Failure(f"{path} is not UTF-8") from None


COMMANDS = (checkpoint, prove, key)
