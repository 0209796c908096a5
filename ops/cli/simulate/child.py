"""`fairgate whatif --json --progress` as a child of a server (`ops/serving/whatif_runner.py`).

It gives way to everything else, takes bounded time and memory, and ends when its standard input does: then
the server is gone.
"""

from __future__ import annotations

import os
import resource
import sys
import threading

from ops.cli.main import cli

NICE = 15
MOST_BYTES = 4 * 2**30
MOST_CPU_S = 3_600


def bound(kind: int, most: int) -> None:
    """Sets a limit of this process, or leaves a lower one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def end_with_the_server() -> None:
    """Returns never: ends this process once its standard input is closed."""
    while os.read(0, 4_096):
        pass
    os._exit(1)


if __name__ == "__main__":
    os.nice(NICE)
    bound(resource.RLIMIT_AS, MOST_BYTES)
    bound(resource.RLIMIT_CPU, MOST_CPU_S)
    threading.Thread(target=end_with_the_server, daemon=True).start()
    cli.main(["whatif", *sys.argv[1:], "--json", "--progress"], prog_name="fairgate")
