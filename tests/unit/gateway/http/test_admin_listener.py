"""Which of two listeners answers which path."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import generate_latest

from gateway.errors import ApiError
from gateway.http.admin_listener import AdminListener, require_listener
from tests.support.http_connection import LIMITS, HttpHouse, MemoryTransport, echo


@pytest.mark.parametrize(
    ("bound", "local", "is_admin"),
    [
        (("127.0.0.1", 9000), ("127.0.0.1", 9000), True),
        (("127.0.0.1", 9000), ("127.0.0.1", 8000), False),
        (("127.0.0.1", 9000), ("10.0.0.1", 9000), False),
        (("0.0.0.0", 9000), ("10.0.0.1", 9000), True),
        (("0.0.0.0", 9000), ("10.0.0.1", 8000), False),
        (("::", 9000), ("::ffff:10.0.0.1", 9000), True),
        (("::1", 9000), ("0:0:0:0:0:0:0:1", 9000), True),
        (("fe80::1%eth0", 9000), ("fe80::1", 9000), True),
        (("10.0.0.1", 9000), ("::ffff:10.0.0.1", 9000), True),
        (("127.0.0.1", 9000), None, False),
        (("127.0.0.1", 9000), ("/run/socket", 9000), False),
    ],
)
def test_a_connection_is_known_by_its_local_address(
    bound: tuple[str, int], local: tuple[str, int] | None, is_admin: bool
) -> None:
    assert AdminListener(*bound).accepted(local) is is_admin


@pytest.mark.parametrize(
    "path",
    [
        *("/admin/v1", "/admin/v1/status", "/admin/v1/", "//admin/v1/keys", "/admin//v1/keys", "/console"),
        *("/console/log-in", "/metrics", "/metrics/", "///metrics", "admin/v1/status"),
    ],
)
def test_admin_paths_are_not_found_on_the_public_listener(path: str) -> None:
    with pytest.raises(ApiError) as refused:
        require_listener(path, is_admin=False)
    assert (refused.value.status, refused.value.code) == (404, "not_found")
    require_listener(path, is_admin=True)


def test_each_listener_answers_what_is_neither_s_own() -> None:
    for path in ("/", "/healthz", "/readyz", "/docs", "/openapi.json", "/admin", "/metricsx", "/consoles"):
        for is_admin in (False, True):
            require_listener(path, is_admin=is_admin)
    require_listener("/v1/models", is_admin=False)
    with pytest.raises(ApiError):
        require_listener("//v1/models", is_admin=True)


ADMIN_PORT = 9000


def answers(transport: MemoryTransport) -> list[tuple[int, str]]:
    """Status, and code or body, of each answer."""
    found = []
    for each in bytes(transport.written).split(b"HTTP/1.1 ")[1:]:
        head, _, body = each.partition(b"\r\n\r\n")
        status = int(head.split()[0])
        found.append((status, json.loads(body)["error"]["code"] if status >= 400 else body.decode()))
    return found


async def test_one_connection_is_answered_by_its_listener_whatever_it_says() -> None:
    house = HttpHouse(admin_port=ADMIN_PORT)
    spoofed = b"host: 127.0.0.1:9000\r\nx-forwarded-port: 9000\r\nforwarded: host=127.0.0.1:9000"
    for port, served, hidden in (
        (8000, "/v1/models", "/%61dmin/v1/x"),
        (ADMIN_PORT, "/metrics", "/v1/models"),
    ):
        connection, transport = house.connect(port=port)
        for path in (served, hidden, "http://127.0.0.1:9000" + hidden, served):
            connection.data_received(b"GET %s HTTP/1.1\r\n%s\r\n\r\n" % (path.encode(), spoofed))
            await house.settle()
        assert answers(transport) == [
            (200, f"GET {served} "),
            (404, "not_found"),
            (404, "not_found"),
            (200, f"GET {served} "),
        ]


async def test_a_flood_of_the_public_listener_takes_no_place_of_the_admin_listener() -> None:
    going = asyncio.Event()

    async def held(scope: Any, receive: Any, send: Any) -> None:
        await going.wait()
        await echo(scope, receive, send)

    house = HttpHouse(replace(LIMITS, max_connections=2), application=held, admin_port=ADMIN_PORT)
    flood = [house.connect() for _ in range(2)]
    for connection, _ in flood:
        connection.data_received(b"GET /v1/x HTTP/1.1\r\nhost: x\r\n\r\n")
    await house.settle()
    _, refused = house.connect()
    assert answers(refused) == [(503, "too_many_connections")]
    operators, transport = house.connect(port=ADMIN_PORT)
    operators.data_received(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    going.set()
    await house.settle()
    assert answers(transport) == [(200, "GET /metrics ")]
    assert b"fairgate_connections 3.0" in generate_latest(house.metrics.registry)
    house.front.sweep(asyncio.get_running_loop().time() + 3_600)
    await house.settle()
    assert transport.is_closing()
    assert all(each.is_closing() for _, each in flood)
