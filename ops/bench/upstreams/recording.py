"""Recorded answers of other servers, a JSON file each under `ops/bench/data/recorded`; tests replay them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

DIRECTORY = Path(__file__).parents[1] / "data" / "recorded"


class ServerAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    status: int
    body: str
    is_stream: bool = False


class RecordedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    path: str
    body: dict[str, Any]
    """Without `model` and the fields of streaming."""
    whole: ServerAnswer
    stream: ServerAnswer | None = None
    varies: list[str] = []
    """Fields of the answers that differed when the server was asked once more."""


class Recording(msgspec.Struct, frozen=True):
    server: str
    version: str
    date: str
    model: str
    context_tokens: int
    requests: list[RecordedRequest]


def save(recording: Recording, directory: Path = DIRECTORY) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{recording.server}.json"
    head = msgspec.json.encode(msgspec.structs.replace(recording, requests=[]))
    lines = b",\n".join(msgspec.json.encode(request) for request in recording.requests)
    path.write_bytes(head.removesuffix(b"[]}") + b"[\n" + lines + b"\n]}\n")
    return path


def load(server: str, directory: Path = DIRECTORY) -> Recording:
    """Reads a server's file. Raises `FileNotFoundError` and `msgspec.ValidationError`."""
    return msgspec.json.decode((directory / f"{server}.json").read_bytes(), type=Recording)


def servers(directory: Path = DIRECTORY) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.json"))
