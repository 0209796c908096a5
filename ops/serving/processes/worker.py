"""One gateway process of several: `python -m ops.serving.processes.worker`, which `workers.py` starts.

Its post comes on standard input, which its supervisor keeps open: when that ends, the worker drains, as at
SIGTERM; SIGINT cuts its requests. On standard output it says one line: that it is up, or why it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvloop

from ops.serving import datadir
from ops.serving.composition import build
from ops.serving.logs import open_log
from ops.serving.open_files import raise_limit
from ops.serving.post import UP, Post
from ops.serving.processes.gateway_process import Stop, Stopped, run_gateway
from ops.serving.processes.refusals import REFUSALS, explain


def main() -> int:
    try:
        post: Post = pickle.load(sys.stdin.buffer)
    except EOFError:
        return 1  # the supervisor has ended
    settings = post.settings
    open_log(settings.log_level, settings.log_format, post.seat.number)
    raise_limit()
    try:
        datadir.ensure(settings.data_dir)
        with (
            datadir.serve_lock(settings.data_dir),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop,
        ):
            loop.run(_run(post))
    except Stopped:
        return 0
    except REFUSALS as error:
        print(explain(error, post.server), flush=True)
        return 1
    return 0


async def _run(post: Post) -> None:
    stop, loop = Stop(), asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(sys.stdin)
        stop.asked.set()

    def cut() -> None:
        stop.asked.set()
        stop.cut()

    loop.add_reader(sys.stdin, ended)
    # A service manager may signal all processes of a service: twice is no reason to cut.
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.asked.set)
    loop.add_signal_handler(signal.SIGINT, cut)
    async with build(post.settings, post.pepper, post=post) as running:
        with _sibling_listener(post.seat.socket) as sibling:
            await run_gateway(running, post.door(), post.limits, stop, _said_up, [sibling])


@contextlib.asynccontextmanager
async def _said_up() -> AsyncIterator[None]:
    print(UP, flush=True)
    yield


@contextlib.contextmanager
def _sibling_listener(path: Path) -> Iterator[socket.socket]:
    """What other workers ask this one at."""
    path.unlink(missing_ok=True)  # of an earlier worker in this seat
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


if __name__ == "__main__":
    sys.exit(main())
