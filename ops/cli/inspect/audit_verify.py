"""`fairgate audit verify`: checks the audit, an export or one row of it, and the ledger by its digests."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import administer
from ops.cli.base import Command, Failure, answer
from ops.cli.inspect.audit_log import FILE, PUBLIC_KEY, parsed_keys, signing_key, text_of

if TYPE_CHECKING:
    from tenants.admin.admin import Admin
    from tenants.audit.note import PublicKey
    from tenants.audit.verify import Verdict
    from tenants.ledger.digests import LedgerVerdict
    from tenants.ledger.price_check import PriceVerdict


@click.command(cls=Command)
@click.option("--export", "file", type=FILE, help="Check this file; no database is asked.")
@click.option("--proof", type=FILE, help="Check this proof of one row (`fairgate audit prove`).")
@PUBLIC_KEY
@click.option(
    "--checkpoint", "kept", type=FILE, multiple=True, help="A checkpoint that was kept elsewhere; several."
)
@click.option("--ledger", is_flag=True, help="Also the ledger's rows, against the audit's digests of them.")
@click.option("--prices", is_flag=True, help="With --ledger: compute each charge again by its prices.")
def verify(
    file: Path | None,
    proof: Path | None,
    public_keys: tuple[str, ...],
    kept: tuple[Path, ...],
    ledger: bool,
    prices: bool,
) -> None:
    """Checks every row of the audit: its number, bytes, columns, the tree over all, and each checkpoint.

    Names the first row that is not as it was signed, and how; the exit code is then 1. Without --export it is
    the database, and without --public-key the data directory's key, else the one that the database names.

    \b
      fairgate audit verify
      fairgate audit verify --ledger --prices
      fairgate audit verify --export audit.jsonl --public-key KEY --checkpoint kept.txt
    --json answers, with --ledger and --prices:
      {"ok": true, "rows": 1812, "signed": 1800, "checkpoints": 31, "finding": null,
       "ledger": {"spans": 12, "rows": 96000, "open_rows": 812, "finding": null},
       "prices": {"charges": 48100, "unpriced": 0, "wrong_count": 0, "wrong": []}}
    """
    if prices and not ledger:
        raise click.UsageError("--prices needs --ledger: charges are computed from rows that are checked")
    if ledger and (file or proof):
        raise click.UsageError("--ledger needs the database: leave out --export and --proof")
    if file is not None and proof is not None:
        raise click.UsageError("give --export or --proof, not both")
    keys = parsed_keys(public_keys)
    notes = [_kept(path) for path in kept]
    if (file or proof) and not keys:
        raise click.UsageError(
            "--export and --proof need --public-key: one that lies in the file proves nothing"
        )
    if proof is not None:
        _verify_proof(proof, keys)
        return
    verdict = _verify_database(keys, notes) if file is None else _verify_file(file, keys, notes)
    bill = None if not ledger or verdict.finding is not None else _verify_ledger(with_prices=prices)
    _tell(verdict, bill)


def _kept(path: Path) -> str:
    from tenants.audit.note import claimed_checkpoint
    from tenants.errors import Invalid

    note = text_of(path)
    try:
        claimed_checkpoint(note)
    except Invalid as error:
        raise Failure(f"{path}: {error}") from None
    return note


def _verify_database(keys: list[PublicKey], notes: list[str]) -> Verdict:
    own = signing_key()

    async def check(admin: Admin) -> Verdict:
        log = admin.transactions.audit_log()
        trusted = keys or ([] if own is None else [own.public])
        if not trusted:
            known = await log.public_key()
            trusted = [] if known is None else [known]
            click.echo("checked with the key that the database itself names: give --public-key", err=True)
        return await log.verify(trusted, notes)

    return administer(check)


def _verify_file(file: Path, keys: list[PublicKey], notes: list[str]) -> Verdict:
    from tenants.audit.export import MAX_LINE_BYTES, verify_export
    from tenants.errors import Invalid

    try:
        with file.open("rb") as first, file.open("rb") as second:
            lines, again = (iter(partial(one.readline, MAX_LINE_BYTES + 1), b"") for one in (first, second))
            return verify_export(lines, again, keys, notes)
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}") from None
    except Invalid as error:
        raise Failure(f"{file}: {error}") from None


def _verify_proof(path: Path, keys: list[PublicKey]) -> None:
    from tenants.audit.note import open_checkpoint, parse_proof
    from tenants.errors import Invalid

    try:
        proof = parse_proof(text_of(path))
        opened = open_checkpoint(proof.checkpoint, keys)
    except Invalid as error:
        raise Failure(f"{path}: {error}") from None
    if proof.entry is None or not proof.proves(proof.entry, opened):
        raise Failure(f"{path}: the row is not in the log that its checkpoint was signed for")
    entry = proof.entry.decode("ascii", "replace")
    answer(
        {"ok": True, "seq": proof.index, "size": opened.size, "entry": entry},
        f"row {proof.index} is in the log of {opened.size:,} rows that {opened.origin} signed:\n{entry}",
    )


def _verify_ledger(*, with_prices: bool) -> tuple[LedgerVerdict, PriceVerdict | None]:
    async def check(admin: Admin) -> tuple[LedgerVerdict, PriceVerdict | None]:
        ledger = admin.ledger
        return await ledger.verify_digests(), await ledger.verify_prices() if with_prices else None

    return administer(check)


def _of_ledger(digests: LedgerVerdict, prices: PriceVerdict | None) -> tuple[dict[str, Any], list[str]]:
    shown: dict[str, Any] = {"ledger": asdict(digests)}
    if digests.finding is not None:
        lines = [f"the ledger was changed: {digests.finding}"]
    else:
        rows = f"{digests.rows:,} ledger rows in {digests.spans:,} spans, as they were digested"
        lines = [rows + (f"; the last {digests.open_rows:,} are not yet" if digests.open_rows else "")]
    if prices is not None:
        shown["prices"] = asdict(prices)
        lines += [str(charge) for charge in prices.wrong]
        more = prices.wrong_count - len(prices.wrong)
        lines += [f"and {more:,} more charges that their prices do not give"] if more else []
        unpriced = f"; {prices.unpriced:,} name no price that there is" if prices.unpriced else ""
        lines.append(f"{prices.charges:,} charges computed again{unpriced}")
    return shown, lines


def _tell(verdict: Verdict, bill: tuple[LedgerVerdict, PriceVerdict | None] | None) -> None:
    finding = verdict.finding
    shown = None
    if finding is not None:
        shown = {
            "damage": str(finding.damage),
            "first": finding.first,
            "last": finding.last,
            "detail": finding.detail,
        }
    more, lines = ({}, []) if bill is None else _of_ledger(*bill)
    is_right = finding is None and (
        bill is None or (bill[0].finding is None and (bill[1] is None or not bill[1].wrong_count))
    )
    answer(
        {
            "ok": is_right,
            "rows": verdict.rows,
            "signed": verdict.signed,
            "checkpoints": verdict.checkpoints,
            "finding": shown,
        }
        | more,
        "\n".join([verdict.words, *lines]) if finding is None else f"the audit was changed: {finding}",
    )
    if not is_right:
        click.get_current_context().exit(1)
