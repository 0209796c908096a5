"""Pytest plugin: fixtures of databases and of Redis, real ones; see `tests/support/services.py`.

The `conftest.py` of a folder whose tests use them registers it; others need not import what it imports.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from migrations import runner
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.directory.directory import Directory
from tenants.storage.database import Database, open_database
from tests.support import services
from tests.support.quota import Clock

PEPPER = b"a pepper for tests, 32 bytes....."


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server on which databases may be created."""
    url = os.environ.get("FAIRGATE_TEST_DATABASE_URL")
    if url:
        yield url
        return
    server = services.start_postgres()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a Redis in which keys that begin with `fairgate` are ours."""
    url = os.environ.get("FAIRGATE_TEST_REDIS_URL")
    if url:
        yield url
        return
    server = services.start_redis()
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[services.Cluster]:
    """Three masters with a replica each, for all tests that leave them as they are."""
    cluster = services.start_cluster()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[services.Cluster]:
    """As `redis_cluster`, of Valkey; skips where there is none."""
    binary = next(iter(services.valkey_binaries()), None)
    if binary is None:
        pytest.skip("no valkey-server on PATH")
    cluster = services.start_cluster(binary=binary)
    yield cluster
    cluster.stop()


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A Redis without any Fairgate keys: one server, or what the test's parameter names."""
    kind = getattr(request, "param", "redis_server")
    found = request.getfixturevalue(kind)
    url = found if isinstance(found, str) else found.url
    services.delete_keys(url)
    yield url
    with suppress(Exception):  # a test may have killed it
        services.delete_keys(url)


@pytest.fixture(scope="session")
def _postgres_template(postgres_server: str) -> Iterator[str]:
    """A migrated database that the tests' own are copied from."""
    url = services.create_database(postgres_server)
    runner.upgrade(url)
    yield services.database_name(url)
    services.drop_database(postgres_server, url)


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite-template") / "fairgate.db"
    runner.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def empty_postgres_url(postgres_server: str) -> Iterator[str]:
    """A new PostgreSQL database without tables."""
    url = services.create_database(postgres_server)
    yield url
    services.drop_database(postgres_server, url)


@pytest.fixture
def postgres_url(postgres_server: str, _postgres_template: str) -> Iterator[str]:
    """A new, migrated PostgreSQL database."""
    url = services.create_database(postgres_server, template=_postgres_template)
    yield url
    services.drop_database(postgres_server, url)


@pytest.fixture
def sqlite_url(tmp_path: Path, _sqlite_template: Path) -> str:
    """A new, migrated SQLite database."""
    path = tmp_path / "fairgate.db"
    shutil.copyfile(_sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated database of each kind."""
    url: str = request.getfixturevalue(f"{'sqlite' if request.param == 'sqlite' else 'postgres'}_url")
    return url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """An open, migrated database of each kind."""
    opened = open_database(database_url)
    yield opened
    await opened.close()


@pytest.fixture
def pepper() -> bytes:
    """The server secret that tests make keys with."""
    return PEPPER


@pytest.fixture
def clock() -> Clock:
    """The time of a test."""
    return Clock()


@pytest.fixture
def admin(database: Database, pepper: bytes, clock: Clock) -> Admin:
    """The acts on that database."""
    return Admin(Transactions(database, pepper, clock))


@pytest.fixture
async def directory(database: Database, pepper: bytes) -> AsyncIterator[Directory]:
    """One that follows that database."""
    made = Directory(database, pepper)
    await made.start()
    yield made
    await made.close()
