"""The most bytes that a token can stand for: a lower bound of a text's tokens without tokenising. Pure.

Only for tokenizers that lose no text: one that strips, replaces or drops text, or has one token for
everything unknown, may make few tokens of any text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import pre_tokenizers

COMPOSED_BYTES = 4
"""NFC shortens a text by less than this factor, in bytes: the Kelvin sign (3 bytes) becomes "K" (1)."""
_LOSSLESS_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
_SPLITTERS = frozenset({"Split", "Punctuation"})


def longest_token_bytes(fields: Mapping[str, Any]) -> int | None:
    """Of a tokenizer described by `fields` (its `tokenizer.json`); None: it may lose text."""
    model = fields.get("model") or {}
    added = fields.get("added_tokens") or []
    vocabulary = model.get("vocab")
    shrinks = _normalizer_shrinks(fields.get("normalizer"))
    splitters = _flat(fields.get("pre_tokenizer"), "pretokenizers")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or shrinks is None:
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added) or not all(map(_keeps, splitters)):
        return None
    is_byte_level = any(splitter["type"] == "ByteLevel" for splitter in splitters)
    if is_byte_level:
        every_byte = pre_tokenizers.ByteLevel.alphabet()
    else:
        every_byte = [f"<0x{byte:02X}>" for byte in range(256)] if model.get("byte_fallback") else [""]
    if not all(byte in vocabulary for byte in every_byte):
        return None  # what it does not know is dropped, or becomes one token
    own = max(len(token) if is_byte_level else len(token.encode()) for token in vocabulary)
    others = max((len(token["content"].encode()) for token in added), default=0)
    return max(own, others) * shrinks


def _normalizer_shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """By what factor a normalizer may shorten a text, in bytes; None: unknown."""
    shrinks = 1
    for step in _flat(normalizer, "normalizers"):
        match step:
            case {"type": "NFC"}:
                shrinks *= COMPOSED_BYTES
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case _:
                return None
    return shrinks


def _keeps(splitter: Mapping[str, Any]) -> bool:
    kind = splitter["type"]
    return kind in _LOSSLESS_SPLITTERS or (kind in _SPLITTERS and splitter.get("behavior") != "Removed")


def _flat(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [leaf for part in step.get(inner, []) for leaf in _flat(part, inner)]
