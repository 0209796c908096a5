"""Where a log-in leads: only to pages of the console. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

START = "/console"
LOG_IN = "/console/log-in"
LOG_OUT = "/console/log-out"
MAX_CHARACTERS = 2_000


def safe(wanted: str) -> str:
    """The path if it is below /console, otherwise the start page. Refuses what browsers read differently from
    servers: backslashes, dot segments (also as `%2e`), control characters."""
    path = wanted.partition("?")[0]
    is_below = path == START or path.startswith(f"{START}/")
    is_plain = wanted.isascii() and wanted.isprintable() and not set(wanted) & set('\\ "<>#')
    segments = path.lower().replace("%2e", ".").split("/")
    is_direct = not {".", ".."} & set(segments) and "%2f" not in path.lower() and "%5c" not in path.lower()
    return wanted if is_below and is_plain and is_direct and len(wanted) <= MAX_CHARACTERS else START


def with_query(path: str, values: Mapping[str, str]) -> str:
    query = urlencode({name: value for name, value in values.items() if value})
    return f"{path}?{query}" if query else path


def log_in_for(path: str) -> str:
    return LOG_IN if path == START else with_query(LOG_IN, {"next": path})
