"""The channel over a UNIX socket: 4 bytes of length, big endian, and a frame; one answer to each.

For versions of vLLM without endpoint plug-ins, and where vLLM's HTTP port is not to carry it. Threads, since
vLLM's engine core has no event loop. Frames are authenticated by `answer`; here is only what bounds a peer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable

from engine.vllm_plugin.signature import MAX_FRAME_BYTES, encode_refusal

MAX_CONNECTIONS = 16
IDLE_S = 60.0
"""A peer that is silent for this long is disconnected; gateways send something every few seconds."""
LENGTH = struct.Struct(">I")

log = logging.getLogger("fairgate.vllm_plugin")


def serve_unix_socket(path: str, answer: Callable[[bytes], bytes]) -> socket.socket:
    """Listens at `path` (mode 0600), answers on daemon threads. Raises ValueError where it cannot listen."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ValueError(f"FAIRGATE_VLLM_SOCKET {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    listener.listen(MAX_CONNECTIONS)
    threading.Thread(target=_accept, args=(listener, answer), name="fairgate channel", daemon=True).start()
    log.info("the channel listens at %s", path)
    return listener


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ValueError(f"FAIRGATE_VLLM_SOCKET {path} exists and is no socket: name another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise ValueError(f"FAIRGATE_VLLM_SOCKET {path}: {error.strerror}") from None
    raise ValueError(f"FAIRGATE_VLLM_SOCKET {path}: another process listens there: name another path")


def _accept(listener: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    free = threading.BoundedSemaphore(MAX_CONNECTIONS)
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            continue
        if not free.acquire(blocking=False):
            peer.close()
            continue
        threading.Thread(
            target=_serve, args=(peer, answer, free), name="fairgate channel peer", daemon=True
        ).start()


def _serve(peer: socket.socket, answer: Callable[[bytes], bytes], free: threading.BoundedSemaphore) -> None:
    try:
        with peer, contextlib.suppress(OSError, EOFError):
            peer.settimeout(IDLE_S)
            while True:
                (length,) = LENGTH.unpack(_read(peer, LENGTH.size))
                if length > MAX_FRAME_BYTES:
                    _write(
                        peer, encode_refusal("too_large", f"a frame holds at most {MAX_FRAME_BYTES} bytes")
                    )
                    return
                frame = answer(_read(peer, length))
                _write(peer, frame)
                if frame.startswith(b"{"):
                    # Refused: a gateway that is in order connects anew.
                    return
    except Exception:
        log.exception("the channel's peer is disconnected")
    finally:
        free.release()


def _read(peer: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = peer.recv(min(65536, length - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _write(peer: socket.socket, frame: bytes) -> None:
    peer.sendall(LENGTH.pack(len(frame)) + frame)
