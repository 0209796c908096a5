"""Process that makes wait surfaces: pictures in, surfaces out, until its input ends.

Run as `python -m engine.forecast.wait.worker` by the gateway, whose event loop has no time for some ten
replays a second. A message is its length (4 bytes, big-endian) and a pickle; both ends are one program.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from struct import Struct
from typing import BinaryIO

from engine.forecast.wait.picture import FUTURES, Picture

HEADER = Struct(">I")
NICENESS = 10
"""Requests and engines go first."""


def serve(pictures: BinaryIO, surfaces: BinaryIO) -> None:
    """Answers each picture with its surface, or with what went wrong as a string."""
    number = 0
    while len(header := pictures.read(HEADER.size)) == HEADER.size:
        content = pictures.read(HEADER.unpack(header)[0])
        number += 1
        try:
            picture: Picture = pickle.loads(content)
            answer = pickle.dumps(picture.surface(futures=FUTURES, seed=number))
        except Exception as error:
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        surfaces.write(HEADER.pack(len(answer)) + answer)
        surfaces.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    gc.freeze()
    serve(sys.stdin.buffer, sys.stdout.buffer)
