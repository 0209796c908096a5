"""`serve --engines 2`: both answer, and one that is killed comes back while the other serves."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.server_process import Server, server_process, until

COUNT = 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < COUNT, reason="each engine needs a core")
def test_both_engines_answer_and_one_that_is_killed_comes_back(tmp_path: Path, chat_model: Path) -> None:
    flags = ("--engine-count", str(COUNT), "--engine-device", "cpu")
    with server_process(tmp_path / "data", chat_model, *flags) as server:
        until(lambda: all(engine["is_up"] for engine in server.status()["engines"]))
        until(lambda: answering(server) == {"engine-0", "engine-1"})
        assert [len(server.engine(number).cpu_affinity()) for number in range(COUNT)] == [
            len(os.sched_getaffinity(0)) // COUNT
        ] * COUNT
        killed = server.engine(1)
        killed.kill()
        until(lambda: answering(server) == {"engine-0"})
        until(lambda: server.status()["engines"][1]["is_up"] and server.engine(1).pid != killed.pid, 60.0)
        until(lambda: answering(server) == {"engine-0", "engine-1"})


def answering(server: Server) -> set[str]:
    """The engines that ran some requests side by side."""
    body = {"model": "tiny", "prompt": "one two three", "max_tokens": 16}
    with server.http() as client, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: client.post("/v1/completions", json=body).json(), range(4)))
    return {answer["fairgate"]["upstream"] for answer in answers}
