"""Lists of the console as CSV files, in parts where they are long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from litestar import Response

from gateway.console.rendering import SECURITY_HEADERS
from tenants.admin.cursor import MAX_PAGE, Page
from tenants.csv_table import csv_text

FILE_PAGES = 10
"""Pages of `MAX_PAGE` rows in one file."""
FILE_ROWS = FILE_PAGES * MAX_PAGE


def csv_response(name: str, text: str) -> Response[str]:
    headers = SECURITY_HEADERS | {"content-disposition": f'attachment; filename="{name}.csv"'}
    return Response(text, headers=headers, media_type="text/csv; charset=utf-8")


def csv_part(
    name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], next_part: str = ""
) -> Response[str]:
    """A file that may be part of a list: its last row and `Link` header (RFC 8288) then point to the next."""
    more = [(f"more rows: {next_part}",)] if next_part else []
    answer = csv_response(f"{name}-part" if next_part else name, csv_text(columns, [*rows, *more]))
    if next_part:
        answer.headers["link"] = f'<{next_part}>; rel="next"'
    return answer


async def csv_list(
    name: str,
    columns: Sequence[str],
    read: Callable[[str | None], Awaitable[Page[dict[str, object]]]],
    cursor: str | None,
    link: Callable[[str], str],
) -> Response[str]:
    """`read` returns at most `MAX_PAGE` rows after a cursor, `link` the file's address after one."""
    rows: list[list[object]] = []
    for _ in range(FILE_PAGES):
        page = await read(cursor)
        rows += [[row[column] for column in columns] for row in page.rows]
        cursor = page.next_cursor
        if cursor is None:
            break
    return csv_part(name, columns, rows, "" if cursor is None else link(cursor))
