"""Keys of engine connections over tcp: ZeroMQ CURVE, encrypted and authenticated both ways.

The engine's file names the gateways' public key, the gateways' file the engine's. All gateways of an engine
share one key pair, which proves no gateway's id, and so do all engines of a pool that have none of their own.
`ipc` needs none: its socket lies in a private directory.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq
from zmq.utils import z85

ENGINE_FILE = "engine-server.keys"
"""Stays on the engine's host."""
GATEWAY_FILE = "engine-gateway.keys"
"""In the data directory of each gateway that uses the engine."""
KEY_BYTES = 32

Keys = TypeVar("Keys", "EngineKeys", "GatewayKeys")


class KeysRefused(ValueError):
    """There are no usable keys; the message says where they were looked for and what to do."""


class EngineKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine needs to take its gateways' connections. All keys are Z85 text."""

    public: str
    secret: str
    gateway_public: str


class GatewayKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a gateway needs to connect to its engine. All keys are Z85 text."""

    public: str
    secret: str
    engine_public: str

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()
        socket.curve_serverkey = self.engine_public.encode()


def own_file(file: str, name: str) -> str:
    """The name of one engine's own file: `engine-server.NAME.keys`; empty `name`: that of all."""
    return f"{file.removesuffix('.keys')}.{name}.keys" if name else file


def make_keys(directory: Path, name: str = "") -> None:
    """Makes both files anew, of one engine or of all. Raises `OSError`."""
    engine_public, engine_secret = (key.decode() for key in zmq.curve_keypair())
    public, secret = (key.decode() for key in zmq.curve_keypair())
    _write(directory / own_file(ENGINE_FILE, name), EngineKeys(engine_public, engine_secret, public))
    _write(directory / own_file(GATEWAY_FILE, name), GatewayKeys(public, secret, engine_public))


def engine_keys(address: str, directory: Path, name: str = "") -> EngineKeys | None:
    """Keys of an engine that binds `address`: its own, else those of all; None for `ipc`. Raises
    `KeysRefused`."""
    path = _found(directory, ENGINE_FILE, name)
    return _keys(address, path, EngineKeys, f"run `fairgate engine keys --data-dir {directory}`")


def gateway_keys(address: str, directory: Path, name: str = "", file: str = "") -> GatewayKeys | None:
    """Keys of a gateway that connects to the engine `name` at `address`: `file`, else the engine's own, else
    those of all; None for `ipc`. Raises `KeysRefused`."""
    return _keys(
        address,
        Path(file) if file else _found(directory, GATEWAY_FILE, name),
        GatewayKeys,
        f"copy {GATEWAY_FILE} there from the engine's data directory, where `fairgate engine keys` makes it",
    )


def _found(directory: Path, file: str, name: str) -> Path:
    own = directory / own_file(file, name)
    return own if own.exists() else directory / file


def _keys(address: str, path: Path, kind: type[Keys], advice: str) -> Keys | None:
    if not address.startswith("tcp:"):
        return None
    try:
        status = path.stat()
        # A mounted secret may be its owner's and readable by this process's group.
        if status.st_mode & (0o077 if status.st_uid == os.getuid() else 0o007):
            raise KeysRefused(
                f"{path} is readable by others: chmod 600 {path}, and make new keys if they were read"
            )
        found = msgspec.json.decode(path.read_bytes(), type=kind)
        for name in kind.__struct_fields__:
            if len(z85.decode(getattr(found, name))) != KEY_BYTES:
                raise ValueError(f"{name} is not a key")
    except OSError as error:
        raise KeysRefused(
            f"{address} needs keys, and {path} cannot be read ({error.strerror}): {advice}"
        ) from None
    except KeysRefused:
        raise
    except (ValueError, LookupError) as error:
        raise KeysRefused(f"{path} is damaged ({error}): {advice}") from None
    return found


def _write(path: Path, keys: EngineKeys | GatewayKeys) -> None:
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
