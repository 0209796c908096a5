"""The audit as a file: JSON lines that can be checked without the database.

Pure: lines in, lines out. The first line names the log and the size; each row has a line with its columns
(for reading) and its bytes (for checking), and each checkpoint has one. A file that is cut, changed, or of
another log or program raises `Invalid`, which names the line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tenants.audit.entry import IDS
from tenants.audit.key_history import ACTION, RESTORE, KeyHistory, SignerChange, change_from
from tenants.audit.note import PublicKey, hash_of_text
from tenants.audit.verify import Head, LogRow, LogVerifier, Verdict
from tenants.errors import Invalid

FORMAT = "fairgate-audit"
VERSION = 1
MAX_LINE_BYTES = 16_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ExportHead:
    """The first line. `size` None: a filtered list, which cannot be checked."""

    public_key: str | None
    size: int | None
    root: str | None


def head_line(head: ExportHead) -> str:
    said = {"format": FORMAT, "version": VERSION, "public_key": head.public_key}
    return _line(said | {"size": head.size, "root": head.root})


def row_line(row: LogRow, names: Mapping[str, Any]) -> str:
    """A row; `names` is shown beside it and is not part of the log: names change."""
    fields = dict(row.fields)
    at = (EPOCH + timedelta(microseconds=fields.pop("at_us"))).isoformat()
    return _line({"seq": row.seq, "at": at, **fields, **names, "entry": row.entry.decode("ascii")})


def checkpoint_line(size: int, note: str) -> str:
    return _line({"checkpoint": note, "size": size})


def verify_export(
    lines: Iterable[bytes], again: Iterable[bytes], keys: Sequence[PublicKey], kept: Sequence[str] = ()
) -> Verdict:
    """Checks a file, which is read twice: its checkpoints and changes of the key first. Raises `Invalid`
    where it is no complete export of a log that one of the keys signs."""
    parsed = _parsed(lines)
    (head, name), checkpoints, changes = _head_of(parsed), [], []
    for number, line in parsed:
        if "checkpoint" in line:
            checkpoints.append(_checkpoint_of(number, line))
        elif line.get("action") in (ACTION, RESTORE):
            changes.append(change_from(_row_of(number, line).entry))
    valid = [change for change in changes if change is not None]
    known = _names(keys, KeyHistory(keys, valid, dict(checkpoints)).changes)
    if name is not None and name not in known:
        raise Invalid("line 1", f"the file is of the log {name}, and the key of {', '.join(known)}")
    verifier = LogVerifier(keys, checkpoints, kept=kept, changes=valid)
    for number, line in _parsed(again):
        if number > 1 and "checkpoint" not in line:
            verifier.add(_row_of(number, line))
    return verifier.verdict(head)


def _names(keys: Sequence[PublicKey], changes: Sequence[SignerChange]) -> list[str]:
    """What the log was called; a restore gives it a new name."""
    renamed = [key for change in changes for key in (change.old, change.new)]
    return list(dict.fromkeys(key.name for key in (*keys, *renamed)))


def _head_of(parsed: Iterator[tuple[int, dict[str, Any]]]) -> tuple[Head, str | None]:
    """The log's head and its name, as the file says."""
    _, said = next(parsed, (1, {}))
    version, size, root, text = (said.get(name) for name in ("version", "size", "root", "public_key"))
    if said.get("format") != FORMAT:
        raise Invalid("line 1", f"does not say that this is an export of format {FORMAT}")
    if version != VERSION:
        raise Invalid(
            "line 1",
            f"the file has version {str(version)[:40]}, and this program reads {VERSION}: use a newer one",
        )
    if size is None:
        raise Invalid("line 1", "this is a filtered list: only an export without a filter can be checked")
    if type(size) is not int or size < 0 or not isinstance(root, str):
        raise Invalid("line 1", "size and root of the log are missing")
    name = PublicKey.parse(text).name if isinstance(text, str) else None
    return Head(size, hash_of_text("line 1", root)), name


def _checkpoint_of(number: int, line: Mapping[str, Any]) -> tuple[int, str]:
    note, size = line.get("checkpoint"), line.get("size")
    if not isinstance(note, str) or type(size) is not int:
        raise Invalid(f"line {number}", "is no checkpoint")
    return size, note


def _row_of(number: int, line: Mapping[str, Any]) -> LogRow:
    try:
        said = dict(line)
        at = datetime.fromisoformat(said.pop("at"))
        fields: dict[str, Any] = {"at_us": (at - EPOCH) // timedelta(microseconds=1)}
        for name in ("actor", "origin", "action", "target", "tenant_id", "before", "after"):
            fields[name] = said[name]
        fields |= {name: said.get(name) for name in IDS}  # older files have none
        if type(said["seq"]) is not int:
            raise ValueError
        return LogRow(said["seq"], said["entry"].encode(), fields)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise Invalid(f"line {number}", "is neither a row nor a checkpoint") from None


def _parsed(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise Invalid(where, f"has more than {MAX_LINE_BYTES} bytes")
        if not line.endswith(b"\n"):
            raise Invalid(where, "has no end: the file is cut off there; export it again")
        if line.endswith(b"\r\n"):
            raise Invalid(
                where, "ends with CR LF: the file was changed on its way; copy it as it is (binary)"
            )
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise Invalid(where, "is not JSON") from None
        if not isinstance(value, dict):
            raise Invalid(where, "is not a JSON object")
        yield number, value


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
