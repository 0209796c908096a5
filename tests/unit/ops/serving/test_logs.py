"""Lines of the log, in both formats."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import copy_context
from types import TracebackType

import pytest

from gateway.log_context import CURRENT, LogContext
from ops.serving.logs import MAX_CHARACTERS, OURS, JsonLines, TextLines, switch_debug

Raised = tuple[type[BaseException], BaseException, TracebackType | None] | None


def record(message: str, *arguments: object, raised: Raised = None) -> logging.LogRecord:
    made = logging.LogRecord("fairgate.x", logging.WARNING, "x.py", 1, message, arguments, raised)
    made.created, made.msecs = 1_700_000_000.007, 7.0
    return made


def line_of(formatter: logging.Formatter, made: logging.LogRecord, context: LogContext | None) -> str:
    def within() -> str:
        CURRENT.set(context)
        return formatter.format(made)

    return copy_context().run(within)


def failure() -> Raised:
    try:
        raise ValueError("no such thing")
    except ValueError:
        found = sys.exc_info()
    assert found[0] is not None
    return found


@pytest.mark.parametrize(
    ("context", "more"),
    [
        (None, {}),
        (LogContext("req_1"), {"request_id": "req_1"}),
        (
            LogContext("req_1", "a" * 32, "ten_1"),
            {"request_id": "req_1", "trace_id": "a" * 32, "tenant_id": "ten_1"},
        ),
    ],
)
def test_a_line_has_the_ids_that_are_known(context: LogContext | None, more: dict[str, str]) -> None:
    made = record("%d lines\nand \u00e4", 2)
    shown = json.loads(line_of(JsonLines(), made, context))
    assert shown == {
        "time": "2023-11-14T22:13:20.007Z", "level": "warning", "logger": "fairgate.x",
        "message": "2 lines\nand \u00e4", **more,
    }  # fmt: skip
    text = line_of(TextLines(), made, context)
    assert text.endswith(" ".join(["WARNING fairgate.x: 2 lines\nand \u00e4", *map("=".join, more.items())]))


def test_one_object_is_one_line_whatever_it_says() -> None:
    made = record("a\r\n\u2028b", raised=failure())
    line = JsonLines().format(made)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["exception"].endswith("ValueError: no such thing")


def test_a_line_is_bounded() -> None:
    made = record("x" * 10 * MAX_CHARACTERS)
    assert json.loads(JsonLines().format(made))["message"] == "x" * MAX_CHARACTERS
    assert len(TextLines().format(made)) == MAX_CHARACTERS


def test_only_our_own_loggers_are_switched() -> None:
    ours, root = logging.getLogger(OURS), logging.getLogger()
    before, others = ours.level, root.level
    try:
        ours.setLevel(logging.WARNING)
        assert switch_debug("warning")
        assert (ours.level, root.level) == (logging.DEBUG, others)
        assert not switch_debug("warning")
        assert (ours.level, root.level) == (logging.WARNING, others)
    finally:
        ours.setLevel(before)


def test_a_worker_s_lines_have_its_number() -> None:
    assert " WARNING worker=3 fairgate.x: no" in line_of(TextLines(3), record("no"), None)
    assert json.loads(line_of(JsonLines(3), record("no"), None))["worker"] == 3
