"""The server's log: text for people or a JSON object a line, with the ids of the request that it belongs to.

Only our own loggers follow `log_level`: libraries' messages below a warning may hold their callers' data. No
line has prompts, answers, keys or passwords, at any level.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

from gateway.log_context import CURRENT

OURS = "fairgate"
"""The parent of all our loggers."""
MAX_CHARACTERS = 16_384
"""Of a message, and of a traceback; the rest is left out."""
LogFormat = Literal["text", "json"]


class TextLines(logging.Formatter):
    """Time, level, worker, logger, message, and the request's ids behind it."""

    def __init__(self, worker: int | None = None) -> None:
        said = "" if worker is None else f"worker={worker} "
        super().__init__(f"%(asctime)s %(levelname)s {said}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line, context = super().formatMessage(record)[:MAX_CHARACTERS], CURRENT.get()
        return line if context is None else " ".join([line, *map("=".join, context.fields())])


class JsonLines(logging.Formatter):
    """One object a line: `time` (RFC 3339), `level`, `logger`, `message`, the worker's number, the request's
    ids, `exception`."""

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        milliseconds = int(record.msecs)
        shown: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_CHARACTERS],
            **self._worker,
        }
        if (context := CURRENT.get()) is not None:
            shown |= context.fields()
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)[-MAX_CHARACTERS:]
        return json.dumps(shown)


def open_log(level: str, log_format: LogFormat, worker: int | None = None) -> None:
    """`worker`: its number among several."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(worker) if log_format == "json" else TextLines(worker))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger(OURS).setLevel(level.upper())


def switch_debug(level: str) -> bool:
    """Switches between debug and `level`; returns whether it is debug now."""
    ours = logging.getLogger(OURS)
    is_debug = ours.level != logging.DEBUG
    ours.setLevel(logging.DEBUG if is_debug else level.upper())
    return is_debug
