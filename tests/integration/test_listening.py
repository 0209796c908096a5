"""The socket that a server listens on."""

from __future__ import annotations

import socket

import pytest

from ops.serving.listeners import PROBE_EVERY_S, StartFailed, doors, listening
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
            doors(settings, 16),
        ):
            raise AssertionError
    with doors(load({"port": 0}), 16) as [door]:
        assert door.admin_url is None
    with doors(load({"port": 0, "admin.listen": "127.0.0.1:0"}), 16) as [door]:
        assert door.admin_listener is not None
        assert door.admin_url == f"http://127.0.0.1:{door.admin_listener.getsockname()[1]}"


def test_workers_share_their_ports_with_each_other_and_with_no_other_server() -> None:
    with doors(load({"port": 0, "workers": 3, "admin.listen": "127.0.0.1:0"}), 16) as three:
        assert len({door.url for door in three}) == len({door.admin_url for door in three}) == 1
        port = three[0].listener.getsockname()[1]
        for workers in (1, 3):
            settings = load({"port": port, "workers": workers})
            with pytest.raises(StartFailed, match=rf"127.0.0.1:{port} is in use"), doors(settings, 16):
                raise AssertionError
