"""What clients may have of the open files, and what is kept for the rest."""

from __future__ import annotations

import pytest

from ops.serving.open_files import ADMIN_CONNECTIONS, MOST_CONNECTIONS_BY_ITSELF, OWN, REDIS, divided
from ops.settings.settings import BadSetting, Settings, load

UPSTREAM = {"upstreams": '[{"name": "a", "model": "m", "url": "http://127.0.0.1:1", "max_concurrent": %d}]'}


@pytest.mark.parametrize("open_files", [128, 256, 1_024, 20_000, 10**6])
def test_clients_and_the_kernels_backlog_leave_the_reserve(open_files: int) -> None:
    found = divided(load(), open_files)
    most = found.connections.max_connections
    assert most + found.backlog <= open_files - OWN
    assert most == MOST_CONNECTIONS_BY_ITSELF or most + found.backlog == open_files - OWN
    assert found.connections.max_per_address == most // 2


def test_redis_and_other_servers_have_a_part() -> None:
    alone = divided(load(), 1_024).connections.max_connections
    with_redis = divided(load({"redis_url": "redis://127.0.0.1"}), 1_024).connections.max_connections
    assert alone - with_redis == REDIS


def test_more_than_there_is_stops_the_start() -> None:
    settings = load({"gateway.max_connections": "1000", "gateway.max_connections_per_address": "7"})
    assert divided(settings, 2_048).connections.max_connections == 1_000
    assert divided(settings, 2_048).connections.max_per_address == 7
    with pytest.raises(BadSetting, match=r"limit of open files is 512.*ulimit -n.*gateway.max_connections"):
        divided(settings, 512)
    with pytest.raises(BadSetting, match="limit of open files is 64"):
        divided(Settings(), 64)


def test_an_admin_listener_has_places_and_a_backlog_of_its_own() -> None:
    alone, both = divided(load(), 1_024), divided(load({"admin.listen": "127.0.0.1:9000"}), 1_024)
    kept = alone.connections.max_connections - both.connections.max_connections
    assert kept == ADMIN_CONNECTIONS + both.backlog
    assert both.admin_connections.max_connections == ADMIN_CONNECTIONS
    assert both.admin_connections.max_head_bytes == both.connections.max_head_bytes
