"""The program `fairgate` that `tests.support.warm_command` installs.

It asks for a fork that runs the command with this process's files, environment and directory, passes signals
on, and ends as the fork ends.
"""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(os.environ["WARM_COMMAND"])
    asked = {
        "arguments": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(),
        "own_group": False, "open_files": None,
    }  # fmt: skip
    socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
    pid = int(connection.recv(64))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int(connection.recv(64) or 1)
sys.exit(code if code >= 0 else 128 - code)
