"""A receiver of webhooks: it checks each signature with the reference library, and may be away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks.webhooks import Webhook

from ops.sandbox.free_port import free_port


@dataclass
class Receiver:
    """What arrived, on one port over all its lives."""

    port: int = field(default_factory=free_port)
    secret: str = ""
    """Empty: signatures are not checked."""
    answers: list[int] = field(default_factory=list)
    """Status codes of the next answers; then 204."""
    fails: list[bytes] = field(default_factory=list)
    """What is in the body of an event that is answered with 503, each once."""
    taken: list[dict[str, Any]] = field(default_factory=list)
    """Events that were answered with a success, each once: known by their ids, as receivers do it."""
    attempts: list[str] = field(default_factory=list)
    """Ids of all events that arrived."""
    bodies: list[bytes] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?from=fairgate"

    def of(self, subject: str, **data: object) -> list[dict[str, Any]]:
        """What was taken of a subject, with these fields."""
        with self._lock:
            return [
                each
                for each in self.taken
                if each["type"] == subject and data.items() <= each["data"].items()
            ]

    def start(self) -> None:
        """Takes requests."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = receiver.take(dict(self.headers), body)
                self.send_response(status)
                if status in (301, 302, 307, 308):
                    self.send_header("location", f"http://127.0.0.1:{receiver.port}/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Is away: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, headers: dict[str, str], body: bytes) -> int:
        """The answer to one request."""
        headers = {name.lower(): value for name, value in headers.items()}
        with self._lock:
            event_id = headers["webhook-id"]
            self.bodies.append(body)
            if self.secret:
                said = Webhook(self.secret).verify(body, headers)  # raises for a wrong signature
            is_new = event_id not in self.attempts or not any(e["id"] == event_id for e in self.taken)
            self.attempts.append(event_id)
            status = self.answers.pop(0) if self.answers else 204
            if failing := [each for each in self.fails if each in body]:
                self.fails.remove(failing[0])
                status = 503
            if self.secret and is_new and status < 300:
                self.taken.append({"id": event_id, **said})
            return status


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver that takes requests."""
    receiver = Receiver()
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop()
