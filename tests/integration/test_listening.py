"""The socket that a server listens on."""

from __future__ import annotations

import socket

from ops.serving.serve import PROBE_EVERY_S, _listening


def test_a_connection_on_which_nothing_moves_is_probed() -> None:
    with (
        _listening("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            assert connection.getsockopt(socket.IPPROTO_TCP, option) == PROBE_EVERY_S
