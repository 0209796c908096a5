"""Fixtures of databases, and which tests need both kinds in each run of the suite."""

from __future__ import annotations

import re
from pathlib import Path
from secrets import token_hex

import pytest

from tests.support.console import HASHER

BOTH_KINDS = {
    "test_audit.py", "test_audit_checkpoints.py", "test_audit_processes.py", "test_database.py",
    "test_contract.py",
    "test_entity_tags.py", "test_fleet.py", "test_idempotency.py", "test_ledger.py", "test_ledger_digests.py",
    "test_mending.py", "test_migrations.py", "test_outbox.py", "test_query_plans.py", "test_usage_fold.py",
    "test_usage_plans.py", "test_verify.py",
}  # fmt: skip
"""What both databases must promise: transactions, locks, plans, the books, several gateways. The statements
of all other files run on SQLite; on PostgreSQL, too, in `make test-long`."""

NO_PASSWORD = HASHER.hash(token_hex())
ON_POSTGRESQL = re.compile(r"\[.*\bpostgresql\b")


ON_CLUSTERS = {"test_peer_requests.py", "test_two_gateways_fair.py", "test_two_gateways_fair_redis.py"}
"""What takes a `redis_url` there runs on clusters of Redis and Valkey, too."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.name in ON_CLUSTERS and "redis_url" in metafunc.fixturenames:
        clusters = [pytest.param(f"{kind}_cluster", marks=pytest.mark.long) for kind in ("redis", "valkey")]
        metafunc.parametrize("redis_url", ["redis_server", *clusters], indirect=True)


@pytest.fixture(autouse=True)
def _cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hash costs is checked by tests/unit/tenants/people/test_passwords.py."""
    monkeypatch.setattr("tenants.people.passwords._HASHER", HASHER)
    monkeypatch.setattr("tenants.people.way_in.NO_PASSWORD", NO_PASSWORD)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the fixtures."""
    config.pluginmanager.import_plugin("tests.support.database_fixtures")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests on PostgreSQL of all other files."""
    for item in items:
        is_other = item.path.parent == Path(__file__).parent and item.path.name not in BOTH_KINDS
        if is_other and ON_POSTGRESQL.search(item.name):
            item.add_marker(pytest.mark.long)
