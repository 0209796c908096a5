"""The metadata of all tables, and types of their columns."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Dialect, Integer, LargeBinary, MetaData, String, TypeDecorator

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

ID = String(40)
NAME = String(64)
WORD = String(16)
#: SQLite autoincrements only columns of exactly the type INTEGER.
SERIAL = BigInteger().with_variant(Integer, "sqlite")


class ExactBytes(TypeDecorator[bytes]):
    """Bytes that hashes are made of. SQLite keeps text in a column of bytes: it is read as no bytes at all,
    which is what was hashed of no row."""

    impl = LargeBinary
    cache_ok = True

    def process_result_value(self, value: Any, dialect: Dialect) -> bytes | None:
        return value if value is None or isinstance(value, bytes) else b""
