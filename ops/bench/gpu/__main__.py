"""`python -m ops.bench.gpu`: as `fairgate bench gpu`, without the command line of Fairgate."""

import argparse
import sys
from functools import partial
from pathlib import Path

from ops.bench.common.errors import CannotBench
from ops.bench.gpu.run import SECTIONS, run

parser = argparse.ArgumentParser("python -m ops.bench.gpu")
parser.add_argument("--section", action="append", choices=SECTIONS, default=[])
parser.add_argument("--out", type=Path, default=Path("gpu.json"))
parser.add_argument("--rehearse", action="store_true")
given = parser.parse_args()
try:
    done = run(given.section, given.out, given.rehearse, partial(print, file=sys.stderr, flush=True))
except CannotBench as error:
    sys.exit(str(error))
sys.exit({True: 0, False: 1, None: 3}[done["ok"]])
