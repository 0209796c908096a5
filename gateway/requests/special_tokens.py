"""Finds special tokens that texts spell, and encodes texts so that these are plain text.

A client that can write a special token can write another role's turn. Special are the tokens that the
tokenizer marks so, and added tokens that the chat template has as markup (`<tool_call>`), white space aside.
"""

from __future__ import annotations

import json

from tokenizers import Encoding, Tokenizer, models


class SpecialTokens:
    """Of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        """`template`: source of the chat template, or empty."""
        added = tokenizer.get_added_tokens_decoder()
        special = {
            token_id: token.content
            for token_id, token in added.items()
            if token.content.strip() and (token.special or token.content in template)
        }
        self._contents = frozenset(special.values())
        self.markup = frozenset(token.content for token in added.values() if not token.special)
        """Added tokens that the tokenizer does not mark as special."""
        self._longest = max(map(len, self._contents), default=0)
        self._first = frozenset(content[0] for content in self._contents)
        self._beginnings = frozenset(c[:size] for c in self._contents for size in range(1, len(c)))
        self._ends = frozenset(c[-size:] for c in self._contents for size in range(1, len(c)))
        self._is_normalised = tokenizer.normalizer is not None and any(
            token.normalized and token_id in special for token_id, token in added.items()
        )
        # The added tokens and an empty model: finds them where the model's tokenizer does.
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        if tokenizer.normalizer is not None:
            self._finder.normalizer = tokenizer.normalizer
        self._finder.add_tokens(list(added.values()))
        self._found = {self._finder.token_to_id(content): content for content in self._contents}
        fields = json.loads(tokenizer.to_str())
        for token in fields["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._contents
        self._as_text = Tokenizer.from_str(json.dumps(fields))
        self._as_text.encode_special_tokens = True
        unknown = fields["model"].get("unk_token")
        # What a text holds that the vocabulary does not know is the unknown token, special or not.
        self._forbidden = special.keys() - {
            fields["model"].get("unk_id"),
            None if unknown is None else tokenizer.token_to_id(unknown),
        }

    def spelled(self, text: str) -> list[str]:
        """In order."""
        if not self._is_normalised and not any(first in text for first in self._first):
            return []
        (found,) = self._finder.encode_batch_fast([text], add_special_tokens=False)
        return [self._found[token_id] for token_id in found.ids if token_id in self._found]

    def may_take_part(self, text: str) -> bool:
        """Whether `text` may be part of a special token with its neighbours: by its end, start or whole."""
        head, tail = text[: self._longest], text[-self._longest :]
        return (
            any(tail[-size:] in self._beginnings for size in range(1, len(tail) + 1))
            or any(head[:size] in self._ends for size in range(1, len(head) + 1))
            or (0 < len(text) < self._longest and any(text in content for content in self._contents))
        )

    def spans(self, text: str) -> list[tuple[int, int, str]]:
        """Start, end and token of each special token in `text`, without the white space that some swallow."""
        (found,) = self._finder.encode_batch([text], add_special_tokens=False)
        spans: list[tuple[int, int, str]] = []
        for token_id, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if token_id in self._found:
                piece = text[begin:end]
                begin += len(piece) - len(piece.lstrip())
                spans.append((begin, max(begin + 1, begin + len(piece.strip())), self._found[token_id]))
        return spans

    def encode_as_text(self, texts: list[str]) -> list[Encoding]:
        """Read as plain text, without what the tokenizer itself adds."""
        found: list[Encoding] = self._as_text.encode_batch_fast(texts, add_special_tokens=False)
        return found

    def has_special(self, encoding: Encoding) -> bool:
        """Whether a text encoded as plain text still has special tokens: it cannot be written otherwise."""
        return not self._forbidden.isdisjoint(encoding.ids)
