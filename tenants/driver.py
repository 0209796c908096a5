"""How does a statement run at the price of the driver alone?

What SQLAlchemy makes for each statement (a context, a result, events) takes longer than a small `INSERT`
itself, and every request waits for two transactions of such. So these few go to the driver: on the same
connection, in the same transaction, with the same errors.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError


def execute(connection: Connection, text: str, parameters: tuple[Any, ...] = ()) -> int:
    """Runs one statement, in the driver's own parameters; returns how many rows it changed. Raises
    `DBAPIError`.

    Where a savepoint is set it goes SQLAlchemy's own way: something failed before, and only that notices
    a connection which is lost.
    """
    if connection.in_nested_transaction():
        return connection.exec_driver_sql(text, parameters).rowcount
    driver: Any = connection.connection.driver_connection
    dbapi: Any = connection.dialect.dbapi
    try:
        cursor = driver.execute(text, parameters)
        rows: int = cursor.rowcount
        cursor.close()
    except dbapi.Error as error:
        # As SQLAlchemy names it, so that callers need to know one family of errors.
        wrapped = DBAPIError.instance(text, parameters, error, dbapi.Error, dialect=connection.dialect)
        raise wrapped from error
    return rows
