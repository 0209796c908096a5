"""Whether a learned table is for what a pool serves: its model and its machine, as far as both are known.

A table names the simulated model (`8b`, a model's name) and machine (`8b on 2 x h100`, `profile
engine-0.learned.json`); a server tells its name in the API, the model's own id, and the kind of device. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from engine.messages import ModelInfo
from gateway.flow.learned.table_file import LearnedTable

GPU_WORDS = frozenset({"h200", "h100", "a100", "l40s"})
"""Of the simulator's machines, those that are no processor."""


def misfit(table: LearnedTable, name: str, announced: Sequence[ModelInfo]) -> str:
    """Why the table does not fit this pool, with the remedy; empty: nothing contradicts. `name`: of the model
    in the API; `announced`: its servers' models."""
    wanted = _words(table.model)
    served = [name, *(model.model_id for model in announced)]
    if wanted and not any(wanted <= _words(word) for word in served):
        return (
            f"the learned table is for the model {table.model!r}, and this is {name!r}: fit one for it with"
            " `fairgate policy learn`"
        )
    kinds = {"cpu" if model.device.startswith("cpu") else "gpu" for model in announced if model.device}
    kind = _kind(table.machine)
    if kind and kinds and kind not in kinds:
        return (
            f"the learned table is for the machine {table.machine!r}, and {name!r} runs on"
            f" {', '.join(sorted({model.device for model in announced}))}: fit one for it with"
            " `fairgate policy learn`"
        )
    return ""


def not_compared(table: LearnedTable) -> str:
    """What cannot be compared; empty: all can."""
    left = [
        what
        for what, known in (("model", _words(table.model)), ("machine", _kind(table.machine)))
        if not known
    ]
    return f"the table's {' and '.join(left)} cannot be compared with what runs here" if left else ""


def _kind(machine: str) -> str:
    words = _words(machine)
    return "gpu" if words & GPU_WORDS else "cpu" if "cpu" in words else ""


def _words(text: str) -> frozenset[str]:
    words: Iterable[str] = re.split(r"[^a-z0-9]+", text.lower())
    return frozenset(word for word in words if word)
