"""The audit as a log: rows, their Merkle tree's head, subtrees, signed checkpoints; and who persons are."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    UniqueConstraint,
)

from tenants.storage.tables.base import ID, SERIAL, ExactBytes, metadata

audit = Table(
    "audit",
    metadata,
    # The leaf's number in the tree: dense, from 0.
    Column("seq", SERIAL, primary_key=True, autoincrement=False),
    Column("at_us", BigInteger, nullable=False, index=True),
    Column("actor", String(128), nullable=False),
    Column("origin", String(128), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(128), nullable=False),
    Column("tenant_id", ID),
    Column("before", JSON(none_as_null=True)),
    Column("after", JSON(none_as_null=True)),
    # The leaf: the same, as it was hashed. The columns beside it are for searching.
    Column("entry", ExactBytes, nullable=False),
    # Of the request that it was made by; NULL: of none.
    Column("request_id", String(40)),
    Column("trace_id", String(32)),
    Index("ix_audit_tenant_id_seq", "tenant_id", "seq"),
    Index("ix_audit_target_seq", "target", "seq"),
    CheckConstraint("typeof(entry) = 'blob'", name="entry_is_blob").ddl_if(dialect="sqlite"),
)

# One row, id 1: the tree over all rows. It moves in the transaction of each row.
audit_head = Table(
    "audit_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    # Roots of the complete subtrees that the tree is made of, 32 bytes each, the largest first.
    Column("frontier", ExactBytes, nullable=False),
    Column("root", ExactBytes, nullable=False),
)

# Roots of each 256 rows, so that proofs need not read all rows.
audit_tiles = Table(
    "audit_tiles",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("root", ExactBytes, nullable=False),
)

# Signed heads, by the number of rows that they speak of.
audit_checkpoints = Table(
    "audit_checkpoints",
    metadata,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("note", String(1_000), nullable=False),
    Column("at_us", BigInteger, nullable=False),
)

# What the audit's rows have only the keyed hash of: a person's name, address, browser. It can be erased.
audit_persons = Table(
    "audit_persons",
    metadata,
    # HMAC-SHA256 of the text under the salt, its first half in hexadecimal, as in the rows.
    Column("digest", String(32), primary_key=True),
    Column("person_id", ID, nullable=False),
    Column("salt", LargeBinary(16), nullable=False),
    Column("text", String(200), nullable=False, index=True),
    UniqueConstraint("person_id", "text"),
)
