"""Ids of the current request for log lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class LogContext:
    """Unknown ids are empty. Tasks started by the request share the object."""

    request_id: str
    trace_id: str = ""
    """Of the caller's trace, or the request's own if traces are kept."""
    tenant_id: str = ""

    def fields(self) -> Iterator[tuple[str, str]]:
        for name in ("request_id", "trace_id", "tenant_id"):
            if value := getattr(self, name):
                yield name, value


CURRENT: ContextVar[LogContext | None] = ContextVar("fairgate_log_context", default=None)
