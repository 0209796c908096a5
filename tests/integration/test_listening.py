"""The socket that a server listens on."""

from __future__ import annotations

import socket

import pytest

from ops.serving.listeners import PROBE_EVERY_S, StartFailed, admin_listening, listening, url_of
from ops.settings.settings import load


def test_a_connection_on_which_nothing_moves_is_probed() -> None:
    with (
        listening("127.0.0.1", 0, 16) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            assert connection.getsockopt(socket.IPPROTO_TCP, option) == PROBE_EVERY_S


def test_an_address_in_use_names_the_setting_of_its_listener() -> None:
    with listening("127.0.0.1", 0, 16) as taken:
        port = taken.getsockname()[1]
        settings = load({"admin.listen": f"127.0.0.1:{port}"})
        with (
            pytest.raises(StartFailed, match=rf"127.0.0.1:{port} is in use.*--admin-listen"),
            admin_listening(settings),
        ):
            raise AssertionError
    with admin_listening(load()) as nothing:
        assert nothing is None
    with admin_listening(load({"admin.listen": "127.0.0.1:0"})) as listener:
        assert listener is not None
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
