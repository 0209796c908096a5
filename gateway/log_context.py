"""Which request a line of the log belongs to: ids that are known wherever its task, or one of its, logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class LogContext:
    """Ids of one request; what is not known yet is empty. Tasks that it starts share the object."""

    request_id: str
    trace_id: str = ""
    """Of the caller's trace, or of the request's own where traces are kept."""
    tenant_id: str = ""

    def fields(self) -> Iterator[tuple[str, str]]:
        for name in ("request_id", "trace_id", "tenant_id"):
            if value := getattr(self, name):
                yield name, value


CURRENT: ContextVar[LogContext | None] = ContextVar("fairgate_log_context", default=None)
"""None: no request's work."""
