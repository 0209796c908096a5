"""The keys of one log, one after the other, and up to which size each of them signs.

Pure. A change of the key is a row that names both keys, and a checkpoint up to that row, signed by both. So
one trusted key of the chain is enough. After that the old key signs nothing, also in a thief's hands.

A restore where the old key is lost says so in its row: then the new key alone signs, and only who trusts it
goes over that change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenants.audit.entry import decode
from tenants.audit.note import PublicKey, parse_checkpoint, text_signed_by_all
from tenants.errors import Invalid

ACTION = "audit.rotate_key"
RESTORE = "audit.restore"
TARGET = "audit-key"
WITHOUT_OLD_KEY = "without_old_key"


@dataclass(frozen=True, slots=True)
class SignerChange:
    """A row that says that from here on another key signs."""

    seq: int
    old: PublicKey
    new: PublicKey
    is_restore: bool = False
    """From here on the log has the name of the new key."""
    is_by_both: bool = True
    """False: the old key was lost."""

    @property
    def size(self) -> int:
        """Rows of the checkpoint that both keys sign."""
        return self.seq + 1


def change_from(entry: bytes) -> SignerChange | None:
    """The change that a row records; None: none, or none that can be read."""
    try:
        return change_of(decode(entry))
    except Invalid:
        return None


def change_of(said: Mapping[str, Any]) -> SignerChange | None:
    """The same of a row's fields."""
    try:
        action = said.get("action")
        if action not in (ACTION, RESTORE):
            return None
        old, new = (PublicKey.parse(str(said[name]["public_key"])) for name in ("before", "after"))
    except (Invalid, KeyError, TypeError):
        return None
    is_lost = action == RESTORE and said["after"].get(WITHOUT_OLD_KEY) is True
    return SignerChange(said["seq"], old, new, action == RESTORE, not is_lost)


class KeyHistory:
    def __init__(
        self,
        trusted: Sequence[PublicKey],
        changes: Iterable[SignerChange] = (),
        notes: Mapping[int, str] | None = None,
    ) -> None:
        """`trusted`: keys known from elsewhere. `changes`: as rows claim; those count that `notes`, the
        checkpoints by size, have with both signatures."""
        self._trusted = list(trusted)
        signed = [] if notes is None else [change for change in changes if _is_signed(change, notes)]
        self._changes = _chain(trusted, sorted(signed, key=lambda change: change.seq))

    @property
    def changes(self) -> list[SignerChange]:
        """Those that are vouched for, in order."""
        return list(self._changes)

    def at(self, size: int) -> list[PublicKey]:
        """Keys of which one signs a checkpoint of that many rows."""
        if not self._changes:
            return self._trusted
        if change_ := next((change for change in self._changes if change.size == size), None):
            return [change_.old, change_.new]
        later = next((change for change in self._changes if change.size > size), None)
        return [self._changes[-1].new if later is None else later.old]


def _is_signed(change: SignerChange, notes: Mapping[int, str]) -> bool:
    note = notes.get(change.size)
    if note is None or change.old == change.new:
        return False
    if (change.old.name == change.new.name) is change.is_restore:
        return False
    signers = [change.old, change.new] if change.is_by_both else [change.new]
    try:
        said = parse_checkpoint(text_signed_by_all(note, signers))
    except Invalid:
        return False
    return (said.origin, said.size) == (change.new.name, change.size)


def _chain(trusted: Sequence[PublicKey], changes: Sequence[SignerChange]) -> list[SignerChange]:
    """The changes that lead from a trusted key to others, in both directions."""
    for at, change in enumerate(changes):
        if change.new in trusted or (change.is_by_both and change.old in trusted):
            first = last = at
            while first and changes[first - 1].new == changes[first].old:
                first -= 1
            while last + 1 < len(changes) and changes[last].new == (later := changes[last + 1]).old:
                if not later.is_by_both and later.new not in trusted:
                    break
                last += 1
            return list(changes[first : last + 1])
    return []
