"""Fixtures that several suites share. Real databases and a real Redis; see
`tests/support/services.py`."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, Phase, settings

from migrations import runner
from tenants.storage.database import Database, open_database
from tests.support import services
from tests.support.chromium import chromium as chromium
from tests.support.chromium import visitor as visitor
from tests.support.server_process import Server, save_chat_model, server_process

PEPPER = b"a pepper for tests, 32 bytes....."
FIRST = ("test_quota_twins.py", "test_two_gateways.py")
"""Files that take minutes: begun last, the suite's other workers would wait for them at its end."""

#: For `make mutants`: one failure is enough, and it must be the broken rule's, not that of a busy machine.
settings.register_profile(
    "mutants",
    phases=(Phase.explicit, Phase.generate),
    database=None,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)

#: For `make fuzz`: other random inputs in every run, and many. Tests in `tests/property/test_fuzz_*.py` leave
#: the number of examples to the profile.
settings.register_profile(
    "fuzz",
    max_examples=50_000,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

#: The same examples in every run: what a suite says of a commit does not depend on luck.
#: `--hypothesis-profile default` looks elsewhere.
settings.register_profile("suite", derandomize=True)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """HTTP clients load all certificate authorities that they trust, each time, which takes longer than most
    requests of a test. No test speaks TLS: here, and in the processes that tests start, they trust one."""
    end = "-----END CERTIFICATE-----\n"
    first, _, _ = Path(certifi.where()).read_text().partition(end)
    directory = tempfile.TemporaryDirectory(prefix="fairgate-tests")
    config.add_cleanup(directory.cleanup)
    trusted = Path(directory.name) / "authority.pem"
    trusted.write_text(first + end)
    os.environ["SSL_CERT_FILE"] = str(trusted)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the collector of cycles, which would walk all modules again and again, and find nothing."""
    gc.disable()
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Each worker of the suite begins with other files: all must import all test modules, and the first to
    import one rewrites its assertions and stores that for the others."""
    report: pytest.CollectReport = yield  # type: ignore[assignment]
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if isinstance(collector, pytest.Directory) and workers > 1:
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        begin = len(report.result) * number // workers
        report.result = [*report.result[begin:], *report.result[:begin]]
    return report  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order in which files are handed out (`--no-loadscope-reorder`), the same in each worker."""
    items.sort(key=lambda item: (item.path.name not in FIRST, item.path))


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


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """A Redis without any Fairgate keys."""
    services.delete_keys(redis_server)
    yield redis_server
    with suppress(Exception):  # a test may have killed it
        services.delete_keys(redis_server)


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


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory that serves both kinds of completion."""
    return save_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    """A server that is shared: each test makes tenants of its own."""
    data_dir = tmp_path_factory.mktemp("server")
    flags = ["--engine-max-sequences", "8", "--gateway-alert-every", "1", "--gateway-webhook-private", "yes"]
    with server_process(data_dir, chat_model, *flags) as running:
        yield running
