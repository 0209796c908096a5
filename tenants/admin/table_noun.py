"""A noun with a table of its own: one row each, set by its names and removed by its id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar, get_type_hints

from sqlalchemy import ColumnElement, Connection, Table, delete, insert, or_, select, update

from tenants.admin.audit import Actor
from tenants.admin.transaction import Change, IfMatch, Transactions
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.errors import Invalid, NotFound
from tenants.fields import without_secrets

R = TypeVar("R")


@dataclass(frozen=True)
class TableNoun(Generic[R]):
    """The record is a frozen dataclass with `id` and, where tenants have some, `tenant_id` (empty: the
    platform's)."""

    name: str
    words: str
    """Of several, for people."""
    table: Table
    record: type[R]
    names: tuple[str, ...]
    """Columns that tell one from another; setting the same again replaces it."""
    order: tuple[ColumnElement[Any], ...]
    as_row: Callable[[Any], dict[str, Any]] = asdict
    as_json: Callable[[Any], dict[str, Any]] = without_secrets
    of_row: Callable[[Mapping[str, Any]], R] | None = None
    """None: the record has the columns as they are."""
    draft_of: Callable[[Any], R] | None = None
    """From the command, ids empty; None: the record has its fields as they are. Raises `Invalid`."""
    most: int = 10_000
    check: Callable[[Transactions, Connection, Any], None] | None = None
    """Of what is to be set, beside what is stored. Raises `Invalid`."""

    def draft(self, wanted: Any) -> R:
        """What the command makes, without ids. Raises `Invalid`."""
        if self.draft_of is not None:
            return self.draft_of(wanted)
        given = {name: getattr(wanted, name, "") for name in get_type_hints(self.record)}
        return self.record(**given | {"id": "", "tenant_id": ""})

    def rows(
        self, connection: Connection, conditions: Sequence[ColumnElement[bool]] = (), most: int | None = None
    ) -> list[R]:
        """In order, at most `most`."""
        columns = [column for column in self.table.c if column.name != "created_us"]
        query = select(*columns).where(*conditions).order_by(*self.order).limit(most)
        make = self.of_row or (lambda row: self.record(**row))
        return [make(dict(row)) for row in connection.execute(query).mappings()]

    def find(self, connection: Connection, reference: str, tenant: str | None = None, now_us: int = 0) -> R:
        """By id, or by a name that tells it from all others. Raises `NotFound`."""
        columns = [self.table.c.id, *([self.table.c.name] if self.names == ("name",) else [])]
        found = self.rows(connection, [or_(*(one == queries.plain(reference) for one in columns))])
        if not found:
            raise NotFound(self.name, reference[:80])
        return found[0]

    async def set(
        self, transactions: Transactions, actor: Actor | str, wanted: Any, if_match: IfMatch = None
    ) -> R:
        """Raises `Invalid`, `NotFound`."""
        draft: Any = self.draft(wanted)

        def change(connection: Connection, now_us: int) -> Change[R]:
            of_tenant = ""
            if getattr(wanted, "tenant", None) is not None:
                of_tenant = queries.find_tenant(connection, wanted.tenant).tenant_id
            made = replace(draft, tenant_id=of_tenant) if "tenant_id" in self.table.c else draft
            if self.check is not None:
                self.check(transactions, connection, made)
            row, table = self.as_row(made), self.table
            same = [table.c[name] == row[name] for name in self.names]
            before: Any = next(iter(self.rows(connection, same)), None)
            if before is None and queries.count(connection, table) >= self.most:
                raise Invalid(self.name, f"the limit of {self.most} {self.words} is reached: remove one")
            after = replace(made, id=new_id(self.name[:3]) if before is None else before.id)
            if before is None:
                at = {"created_us": now_us} if "created_us" in table.c else {}
                connection.execute(insert(table).values(self.as_row(after) | at))
            else:
                connection.execute(update(table).where(table.c.id == before.id).values(self.as_row(after)))
            was = None if before is None else self.as_json(before)
            return Change(after, after.id, of_tenant or None, was, self.as_json(after))

        return await transactions.act(actor, f"{self.name}.set", change, if_match)

    async def remove(
        self, transactions: Transactions, actor: Actor | str, reference: str, if_match: IfMatch = None
    ) -> R:
        """Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[R]:
            before: Any = self.find(connection, reference)
            connection.execute(delete(self.table).where(self.table.c.id == before.id))
            of_tenant = getattr(before, "tenant_id", "") or None
            return Change(before, before.id, of_tenant, before=self.as_json(before))

        return await transactions.act(actor, f"{self.name}.remove", change, if_match)
