"""Prints what the installed vLLM has of the seams that the plug-in holds on to, as JSON.

Run by the Python of vLLM's environment, in which the wheel `fairgate-vllm` is installed. Of each version that
the plug-in was run with the answer is kept in `tests/unit/engine/vllm_plugin/seams.json`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module


def main() -> None:
    entry, check = import_module("fairgate_vllm.vllm_entry"), import_module("fairgate_vllm.seam_check")
    version = import_module("vllm").__version__
    print(json.dumps({version: asdict(check.look(entry.vllm_classes()))}))


if __name__ == "__main__":
    main()
