"""Signed notes, checkpoints and proofs as text (C2SP signed-note, tlog-checkpoint, tlog-proof; Ed25519).

Pure. Malformed text raises `Invalid`. Trust a note's text only once a known key's signature was verified."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from tenants.audit.tree import HASH_BYTES, is_included, leaf_hash
from tenants.errors import Invalid

ED25519 = 1
PROOF_HEADER = "c2sp.org/tlog-proof@v1"
MAX_NOTE_CHARS = 100_000
MAX_PROOF_CHARS = 1_000_000
MAX_SIGNATURES = 64
MAX_NAME_CHARS = 200
MAX_PROOF_HASHES = 64
_SECRET_PREFIX = "PRIVATE+KEY"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key that notes are checked with, and its name, which is the log's origin."""

    name: str
    raw: bytes

    def __post_init__(self) -> None:
        if not _is_key_name(self.name):
            raise Invalid("key", f"a name has 1 to {MAX_NAME_CHARS} characters, no spaces and no +")
        if len(self.raw) != HASH_BYTES:
            raise Invalid("key", "an Ed25519 key has 32 bytes")

    @property
    def key_id(self) -> bytes:
        return hashlib.sha256(self.name.encode() + b"\n" + bytes([ED25519]) + self.raw).digest()[:4]

    def __str__(self) -> str:
        """As it is given to auditors."""
        material = base64.b64encode(bytes([ED25519]) + self.raw).decode()
        return f"{self.name}+{self.key_id.hex()}+{material}"

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Reads `name+id+key`. Raises `Invalid`."""
        name, _, rest = text.strip().partition("+")
        key_id, _, material = rest.partition("+")
        key = cls(name, _key_material("public key", material))
        if key.key_id.hex() != key_id:
            raise Invalid("public key", f"{key_id[:64]!r} is not the id of this name and key: it was changed")
        return key


@dataclass(frozen=True, slots=True)
class SigningKey:
    name: str
    seed: bytes = field(repr=False)

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.name, self._private.public_key().public_bytes_raw())

    def to_secret_text(self) -> str:
        """The form in which it is kept in a file (that of Go's package `note`). Secret."""
        material = base64.b64encode(bytes([ED25519]) + self.seed).decode()
        return f"{_SECRET_PREFIX}+{self.name}+{self.public.key_id.hex()}+{material}"

    @classmethod
    def parse(cls, text: str) -> SigningKey:
        """Reads what `to_secret_text` wrote. Raises `Invalid`, whose text does not hold the key."""
        text = text.strip()
        if not text.startswith(f"{_SECRET_PREFIX}+"):
            raise Invalid("audit key", f"does not begin with {_SECRET_PREFIX}+")
        name, _, rest = text.removeprefix(f"{_SECRET_PREFIX}+").partition("+")
        key_id, _, material = rest.partition("+")
        key = cls(name, _key_material("audit key", material))
        if key.public.key_id.hex() != key_id:
            raise Invalid("audit key", "its id is not that of its name and key: it was changed")
        return key

    def signed(self, text: str) -> str:
        """The text as a note with one signature."""
        return f"{text}\n{self.signature(text)}"

    def signature(self, text: str) -> str:
        """The line below a note."""
        signature = self.public.key_id + self._private.sign(text.encode())
        return f"— {self.name} {base64.b64encode(signature).decode()}\n"

    @property
    def _private(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


@dataclass(frozen=True, slots=True)
class InclusionProof:
    """That one entry is in a log: its index, the path to the root, the signed checkpoint, and the entry."""

    index: int
    path: tuple[bytes, ...]
    checkpoint: str
    entry: bytes | None = None

    @property
    def text(self) -> str:
        extra = () if self.entry is None else (f"extra {base64.b64encode(self.entry).decode()}",)
        hashes = (base64.b64encode(digest).decode() for digest in self.path)
        return "\n".join((PROOF_HEADER, *extra, f"index {self.index}", *hashes, "", self.checkpoint))

    def proves(self, entry: bytes, checkpoint: Checkpoint) -> bool:
        """Whether it shows that the entry is in the log of the checkpoint, which was opened from its own."""
        return is_included(leaf_hash(entry), self.index, checkpoint.size, self.path, checkpoint.root)


def open_note(note: str, keys: Sequence[PublicKey]) -> str:
    """Raises `Invalid` unless one of the keys signed the note."""
    text, signatures = _parts(note)
    known = {(key.name, key.key_id): key for key in keys}
    is_signed = False
    for name, signature in signatures:
        key = known.get((name, signature[:4]))
        if key is None:
            continue
        try:
            Ed25519PublicKey.from_public_bytes(key.raw).verify(signature[4:], text.encode())
        except InvalidSignature:
            raise Invalid(
                "note", f"the signature by {name} is not right: text or signature changed"
            ) from None
        is_signed = True
    if not is_signed:
        names = ", ".join(sorted({f"{name}+{signature[:4].hex()}" for name, signature in signatures}))
        raise Invalid("note", f"no known key has signed it; signed by: {names}")
    return text


def text_signed_by_all(note: str, keys: Sequence[PublicKey]) -> str:
    """Raises `Invalid` unless all of the keys signed the note."""
    return {open_note(note, [key]) for key in keys}.pop()


def claimed_checkpoint(note: str) -> Checkpoint:
    """Without checking signatures. Raises `Invalid`."""
    return parse_checkpoint(note.rpartition("\n\n")[0] + "\n")


def open_checkpoint(note: str, keys: Sequence[PublicKey]) -> Checkpoint:
    """A checkpoint signed by the one of the keys that is named as its origin. Raises `Invalid`."""
    claimed = claimed_checkpoint(note)
    own = [key for key in keys if key.name == claimed.origin]
    if not own:
        raise Invalid("checkpoint", f"is of {claimed.origin}, and no known key has that name: another log's")
    return parse_checkpoint(open_note(note, own))


def parse_checkpoint(text: str) -> Checkpoint:
    """Lines after the third are ignored. Raises `Invalid`."""
    lines = text.split("\n")
    if len(lines) < 4 or lines.pop() or not all(lines):
        raise Invalid("checkpoint", "needs three lines: origin, size, root")
    origin, size, root = lines[:3]
    return Checkpoint(origin, _number("checkpoint size", size), hash_of_text("checkpoint root", root))


def parse_proof(text: str) -> InclusionProof:
    """Reads a tlog-proof; its checkpoint is not verified. Raises `Invalid`."""
    if len(text) > MAX_PROOF_CHARS:
        raise Invalid("proof", f"has more than {MAX_PROOF_CHARS} characters")
    head, blank, checkpoint = text.partition("\n\n")
    lines = head.split("\n")
    if lines.pop(0) != PROOF_HEADER:
        raise Invalid("proof", f"the first line is not {PROOF_HEADER}")
    entry = None
    if lines and lines[0].startswith("extra "):
        entry = _decoded("proof extra", lines.pop(0).removeprefix("extra "))
    if not blank or not lines or not lines[0].startswith("index "):
        raise Invalid("proof", "needs a line with its index, and a checkpoint after an empty line")
    index = _number("proof index", lines.pop(0).removeprefix("index "))
    if len(lines) > MAX_PROOF_HASHES:
        raise Invalid("proof", f"has more than {MAX_PROOF_HASHES} hashes")
    return InclusionProof(index, tuple(hash_of_text("proof", line) for line in lines), checkpoint, entry)


def hash_of_text(field: str, text: str) -> bytes:
    """A SHA-256 hash from base64. Raises `Invalid`."""
    digest = _decoded(field, text)
    if len(digest) != HASH_BYTES:
        raise Invalid(field, f"a hash has {HASH_BYTES} bytes, this one {len(digest)}")
    return digest


def _parts(note: str) -> tuple[str, list[tuple[str, bytes]]]:
    """A note's text, and its signatures by name."""
    if len(note) > MAX_NOTE_CHARS:
        raise Invalid("note", f"has more than {MAX_NOTE_CHARS} characters")
    if any(letter < " " and letter != "\n" for letter in note):
        raise Invalid("note", "has a control character; lines end with a line feed alone")
    text, blank, below = note.rpartition("\n\n")
    lines = below.split("\n")
    if not blank or not text or lines.pop() or not lines:
        raise Invalid("note", "needs text, an empty line, and signatures; the last line ends, too")
    if len(lines) > MAX_SIGNATURES:
        raise Invalid("note", f"has more than {MAX_SIGNATURES} signatures")
    signatures = []
    for line in lines:
        dash, _, rest = line.partition(" ")
        name, _, encoded = rest.partition(" ")
        if dash != "—" or not _is_key_name(name):
            raise Invalid("note", "a signature is a line of an em dash, a name and base64")
        signature = _decoded("note signature", encoded)
        if len(signature) <= 4:
            raise Invalid("note signature", "is too short")
        signatures.append((name, signature))
    return text + "\n", signatures


def _is_key_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and "+" not in name and name.isprintable() and " " not in name


def _key_material(field: str, text: str) -> bytes:
    material = _decoded(field, text)
    if len(material) != 1 + HASH_BYTES or material[0] != ED25519:
        raise Invalid(field, "is not an Ed25519 key in the form name+id+base64")
    return material[1:]


def _decoded(field: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Invalid(field, f"{text[:32]!r} is not base64") from None


def _number(field: str, text: str) -> int:
    """A decimal without leading zeroes."""
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or (text[0] == "0" and text != "0"):
        raise Invalid(field, f"{text[:32]!r} is not a number")
    return int(text)
