"""Digests of spans of ledger rows: for each kind of row a count, a sum of money and a Merkle root (RFC 6962).

Pure. A span is all rows whose ids lie between two, both included. A row's bytes are a JSON array of its
columns, with `detail` and `labels` as the text that is stored; the leaves of a kind are in order of ids."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tenants.audit.tree import leaf_hash, root_of, subtree_of_leaves
from tenants.errors import Invalid
from tenants.ledger.rows import KINDS

MAX_SPAN_ROWS = 10_000
FORMAT = 1
"""Of a row's bytes. Other columns are another format: what was digested stays as it was."""
FIELDS = (
    *("id", "request_id", "kind", "number", "tenant_id", "project_id", "key_id", "gateway_id"),
    *("tier", "model"),
    *("input_tokens", "output_tokens", "cost_nanousd", "requests", "gpu_ms"),
    *("counted_input", "counted_output", "counted_cost", "price_version", "outcome", "at_us", "detail"),
    *("counter_set", "labels"),
)
"""Columns in the order of a row's bytes."""
_KIND, _COST = FIELDS.index("kind"), FIELDS.index("cost_nanousd")
_encode = msgspec.json.Encoder().encode


class KindDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one kind in a span."""

    rows: int
    cost_nanousd: int
    root: str
    """Base64."""


class SpanDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rows of a span, by kind; a kind without rows is left out."""

    first_id: int
    last_id: int
    kinds: dict[str, KindDigest]
    format: int = FORMAT

    @property
    def rows(self) -> int:
        return sum(digest.rows for digest in self.kinds.values())

    def as_json(self) -> dict[str, Any]:
        """As it is kept in the audit."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


def span_from(said: Any) -> SpanDigest:
    """Inverse of `as_json`. Raises `Invalid`."""
    try:
        span = msgspec.convert(said, SpanDigest)
    except msgspec.ValidationError as error:
        raise Invalid("ledger digest", str(error)) from None
    if span.format != FORMAT:
        raise Invalid(
            "ledger digest", f"has format {span.format}, and this program knows {FORMAT}: use a newer one"
        )
    return span


def digest_of(first_id: int, last_id: int, rows: Iterable[Sequence[Any]]) -> SpanDigest:
    """`rows` come in order of ids, with the columns of `FIELDS`."""
    leaves: dict[str, list[bytes]] = {}
    costs: dict[str, int] = {}
    for row in rows:
        kind = row[_KIND]
        leaves.setdefault(kind, []).append(leaf_hash(_encode(tuple(row))))
        costs[kind] = costs.get(kind, 0) + row[_COST]
    kinds = {
        kind: KindDigest(len(found), costs[kind], _root(found)) for kind, found in sorted(leaves.items())
    }
    return SpanDigest(first_id, last_id, kinds)


def _root(leaves: Sequence[bytes]) -> str:
    return base64.b64encode(root_of(0, len(leaves), subtree_of_leaves(leaves))).decode()


@dataclass(frozen=True, slots=True)
class KindDifference:
    """How the rows of one kind differ from the digest."""

    kind: str
    detail: str


def differences(said: SpanDigest, actual: SpanDigest) -> list[KindDifference]:
    """Kinds whose rows differ from the digest; the kinds of bills first."""
    changed = []
    for kind in sorted({*said.kinds, *actual.kinds}, key=_order):
        old, new = said.kinds.get(kind), actual.kinds.get(kind)
        if old != new:
            changed.append(KindDifference(kind, _difference(old, new)))
    return changed


def _order(kind: str) -> tuple[int, str]:
    bills = ("settle", "credit", "adjust")
    return (bills.index(kind) if kind in bills else len(bills) + (kind not in KINDS), kind)


def _difference(old: KindDigest | None, new: KindDigest | None) -> str:
    rows_old, rows_new = (0 if rows is None else rows.rows for rows in (old, new))
    cost_old, cost_new = (0 if rows is None else rows.cost_nanousd for rows in (old, new))
    if rows_old != rows_new:
        count = f"{rows_old} rows were digested, there are {rows_new}"
    else:
        count = f"of its {rows_old} rows one or more were changed"
    if cost_old == cost_new:
        return count
    return f"{count}; the sum of their costs is off by {cost_new - cost_old:+d} nano-dollars"
