"""Sets up the gateway's side inside a vLLM server, from the environment.

- `FAIRGATE_VLLM_KEY_FILE`: the key that gateways share with this server. Without it no signature is good, and
  there is no channel.
- `FAIRGATE_VLLM_SOCKET`: path of a UNIX socket to listen on, besides vLLM's own HTTP (`http_endpoint.py`).
- `FAIRGATE_VLLM_GATEWAY_TIMEOUT_S`: a gateway that was silent for longer is gone (default 30).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from typing import Any

from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import make_policy, options_of
from engine.vllm_plugin.channel.answer import Channel
from engine.vllm_plugin.channel.desk import GatewayDesk
from engine.vllm_plugin.channel.unix_socket import serve_unix_socket
from engine.vllm_plugin.key_file import read_key
from engine.vllm_plugin.options import GATEWAY_TIMEOUT, KEY_FILE, SOCKET

DEFAULT_TIMEOUT_S = 30.0
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 1.0, 3600.0

log = logging.getLogger("fairgate.vllm_plugin")


def make_desk(environ: Mapping[str, str]) -> GatewayDesk:
    """Returns this process's desk, listening on a socket if set. Raises ValueError naming a setting."""
    timeout_s = _timeout_s(environ.get(GATEWAY_TIMEOUT, ""))
    path, socket_path = environ.get(KEY_FILE, ""), environ.get(SOCKET, "")
    key = None
    if path:
        try:
            key = read_key(path)
        except ValueError as error:
            raise ValueError(f"FAIRGATE_VLLM_KEY_FILE: {error}") from None
    elif socket_path:
        raise ValueError("FAIRGATE_VLLM_SOCKET is set: set FAIRGATE_VLLM_KEY_FILE as well")
    desk = GatewayDesk(
        key,
        timeout_s=timeout_s,
        life=secrets.token_hex(8),
        version=_version(),
        wall_clock=time.time,
        check_policy=check_policy,
    )
    if key is None:
        log.warning("FAIRGATE_VLLM_KEY_FILE is not set: every request is of one default tenant")
        return desk
    channel = Channel(desk, key)
    desk.answer = partial(channel.answer, is_core_thread=True)
    if socket_path:
        serve_unix_socket(socket_path, partial(channel.answer, is_core_thread=False))
    return desk


def check_policy(name: str, options: dict[str, Any]) -> PolicyOptions:
    """The options of a policy that exists. Raises ValueError, naming those that do."""
    parsed = options_of(options)
    make_policy(name, parsed)
    return parsed


def _version() -> str:
    """Of the wheel, or of the project where it is not installed as one."""
    for name in ("fairgate-vllm", "fairgate"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "0+unknown"


def _timeout_s(text: str) -> float:
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not LEAST_TIMEOUT_S <= value <= MOST_TIMEOUT_S:
        raise ValueError(
            f"FAIRGATE_VLLM_GATEWAY_TIMEOUT_S is {text[:80]!r}: it must be a number of seconds from "
            f"{LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S:g}"
        )
    return value
