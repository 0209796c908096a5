"""Which rows a statement reads: its plan by EXPLAIN, on SQLite and on PostgreSQL.

A plan may read a large table by a search in an index; or along an index in the wanted order, row by row,
where a LIMIT ends that. PostgreSQL also runs the statement and counts the rows that it visited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, event

LARGE = frozenset({"ledger", "timelines", "refusals", "slo_misses", "audit", "control_moves"})
"""Tables that grow with every request, act or move."""
_ALIAS = re.compile(r"\b(\w+) AS (\w+)\b")
_SCAN = re.compile(r"SCAN (\w+)")
_SORT = re.compile(r"TEMP B-TREE FOR (?!LAST|RIGHT PART)")
"""Of all rows; after an index has ordered them by its columns, only rows of one instant are sorted."""


@dataclass(frozen=True)
class Statement:
    """A statement as it was given to the driver."""

    text: str
    parameters: Any

    @property
    def is_read(self) -> bool:
        return self.text.lstrip().upper().startswith(("SELECT", "WITH"))


@dataclass
class Recorder:
    """The statements of this process's connections, while it records."""

    statements: list[Statement] = field(default_factory=list)
    is_on: bool = False

    def note(self, _c: Any, _cursor: Any, text: str, parameters: Any, _context: Any, _many: bool) -> None:
        if self.is_on:
            self.statements.append(Statement(text, parameters))

    def start(self) -> None:
        """Records from here on, and forgets what was before."""
        self.statements, self.is_on = [], True

    def stop(self) -> list[Statement]:
        """What was executed since `start`."""
        self.is_on = False
        return self.statements


@contextmanager
def recorder() -> Iterator[Recorder]:
    """Hears of every statement of every engine of this process."""
    made = Recorder()
    event.listen(Engine, "before_cursor_execute", made.note)
    try:
        yield made
    finally:
        event.remove(Engine, "before_cursor_execute", made.note)


def whole_scans(connection: Connection, statement: Statement) -> list[str]:
    """The parts of the plan that read a large table from end to end."""
    if connection.dialect.name == "sqlite":
        return _sqlite_scans(connection, statement)
    return [
        f"{node['Node Type']} of {node['Relation Name']}"
        for node, parent in nodes(plan_of(connection, statement))
        if node.get("Relation Name") in LARGE and _is_whole(node, parent)
    ]


def visited(connection: Connection, statement: Statement) -> int:
    """Rows of large tables that PostgreSQL reads to answer the statement."""
    total = 0
    for node, _ in nodes(plan_of(connection, statement, analyze=True)):
        if node.get("Relation Name") in LARGE:
            rows = node["Actual Rows"] + sum(
                node.get(name, 0) for name in ("Rows Removed by Filter", "Rows Removed by Index Recheck")
            )
            total += round(rows * node["Actual Loops"])
    return total


def plan_of(connection: Connection, statement: Statement, *, analyze: bool = False) -> dict[str, Any]:
    """PostgreSQL's plan."""
    connection.exec_driver_sql("SET enable_seqscan = off")
    how = "ANALYZE, FORMAT JSON" if analyze else "FORMAT JSON"
    found: Any = connection.exec_driver_sql(
        f"EXPLAIN ({how}) {statement.text}", statement.parameters
    ).scalar()
    plans = json.loads(found) if isinstance(found, str) else found
    plan: dict[str, Any] = plans[0]["Plan"]
    return plan


def nodes(
    plan: dict[str, Any], parent: dict[str, Any] | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Every node of a plan, with the one above it."""
    yield plan, parent
    for each in plan.get("Plans", ()):
        yield from nodes(each, plan)


def _is_whole(node: dict[str, Any], parent: dict[str, Any] | None) -> bool:
    if node["Node Type"] == "Seq Scan":
        return True
    if "Index Cond" in node or node["Node Type"].startswith("Bitmap"):
        return False
    is_ended = parent is not None and parent["Node Type"] in ("Limit", "Incremental Sort", "Nested Loop")
    return not is_ended


def _sqlite_scans(connection: Connection, statement: Statement) -> list[str]:
    rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement.text}", statement.parameters)
    details = [str(row[3]) for row in rows]
    names = {alias: table for table, alias in _ALIAS.findall(statement.text)}
    sorts = any(_SORT.search(each) for each in details)
    is_ended = "LIMIT" in statement.text and not sorts
    return [
        each
        for each in details
        if (found := _SCAN.match(each)) and names.get(found[1], found[1]) in LARGE and not is_ended
    ]
