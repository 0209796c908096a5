"""A collector of spans: OTLP over HTTP, read with OpenTelemetry's own protobufs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

PATH = "/v1/traces"


class ReceivedSpan:
    """A span that arrived, with the name of the process that sent it."""

    def __init__(self, service: str, span: trace_pb2.Span) -> None:
        self.service = service
        self.name: str = span.name
        self.kind: str = trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.state: str = span.trace_state
        self.start_ns: int = span.start_time_unix_nano
        self.end_ns: int = span.end_time_unix_nano
        self.attributes = attributes_of(span.attributes)
        self.events = [(each.name, attributes_of(each.attributes)) for each in span.events]
        self.links = [(each.trace_id.hex(), each.span_id.hex()) for each in span.links]
        self.is_error: bool = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes by name."""
    return {each.key: _value(each.value) for each in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


class OtlpReceiver:
    """What arrived, and how the next exports are answered."""

    def __init__(self) -> None:
        self.status = 200
        """A redirection points to `/elsewhere`."""
        self.spans: list[ReceivedSpan] = []
        self.bodies: list[bytes] = []
        self.requests = 0
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}
        """Of the last export."""
        self.goes_on = threading.Event()
        """While it is not set, no export is answered."""
        self.goes_on.set()
        self.url = ""

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """The spans by trace id."""
        found: dict[str, list[ReceivedSpan]] = {}
        for each in list(self.spans):
            found.setdefault(each.trace_id, []).append(each)
        return found

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Takes one export; returns the status of its answer."""
        self.requests += 1
        self.bodies.append(body)
        self.paths.append(path)
        self.headers = headers
        self.goes_on.wait(30)
        if self.status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = str(attributes_of(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    self.spans += [ReceivedSpan(service, each) for each in scope.spans]
        return self.status


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A collector that listens until the end."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(self.headers["content-length"]))
            status = receiver.take(self.path, headers, body)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("location", "/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        receiver.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()
