"""Readiness of the server that runs on a data directory, for health checks: imports little, asks once."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

from ops.serving.datadir import running_server

TIMEOUT_S = 4.0


def readiness(data_dir: Path) -> str:
    """Why the server is not ready; empty: it is. Waits `TIMEOUT_S` seconds for each part of it."""
    server = running_server(data_dir)
    if server is None:
        return f"no server runs on {data_dir}"
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        text = answer.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return f"the server at {server.url} does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
    return "" if answer.status == 200 else f"the server at {server.url} is not ready: {text}"
