"""What stops a start, and the line that says so."""

from __future__ import annotations

from engine.client.client import EngineUnavailable
from gateway.requests.prompt import TokenizerMissing
from ops.serving.datadir import DataDirRefused
from ops.serving.hub_model import ModelMissing
from ops.serving.listeners import StartFailed
from ops.serving.supervisor import EngineStartFailed
from ops.settings.settings import BadSetting, Settings
from tenants.errors import DatabaseUnavailable, NotWritten, TenancyError
from tenants.quota.store import QuotaStoreUnavailable

REFUSALS = (
    StartFailed,
    BadSetting,
    ModelMissing,
    DataDirRefused,
    TenancyError,
    TokenizerMissing,
    QuotaStoreUnavailable,
    EngineStartFailed,
    EngineUnavailable,
    OSError,
)
"""What stops a start; `explain` has a line for each."""


def explain(error: Exception, settings: Settings) -> str:
    """One line: what is wrong and what to do, without the driver's own message."""
    if isinstance(error, QuotaStoreUnavailable):
        way_out = "start it, or correct --redis-url"
        if settings.workers == 1:
            way_out = "start it, correct --redis-url, or leave it out to keep the counters in the process"
        return f"Redis at {_without_password(settings.redis_url)}: {error}; {way_out}"
    if isinstance(error, DatabaseUnavailable):
        way_out = "start it or correct --database-url"
        if isinstance(error, NotWritten):
            way_out = "its disk needs room, and must be writable"
        return f"database {_without_password(settings.resolved_database_url)}: {error}; {way_out}"
    if isinstance(error, EngineStartFailed):
        return f"the engine did not start: {error}"
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return str(error)


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    # What follows a `?` may have the Sentinels' password.
    credentials, at, place = rest.partition("?")[0].rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user + at if user else ''}{place}"
