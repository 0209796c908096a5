"""Processor time of grammars' masks: which tokens may follow, by the model's tokenizer."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.grammar.compiler import Grammars
from engine.grammar.source import of_schema

ROWS, STEPS = 16, 32
_NAME, _NUMBER = {"type": "string", "maxLength": 40}, {"type": "number"}
SCHEMA = {"type": "object", "properties": {"name": _NAME, "sizes": {"type": "array", "items": _NUMBER}}}


def mask_s(model_dir: Path, config: dict[str, Any]) -> float | None:
    """Of a row, in seconds: random answers to a schema. None: the model has no tokenizer."""
    tokenizer, ends = model_dir / "tokenizer.json", config.get("eos_token_id") or 0
    if not tokenizer.is_file():
        return None
    grammars = Grammars(tokenizer, config["vocab_size"], ends if isinstance(ends, list) else [ends])
    grammar, generator = of_schema(SCHEMA | {"required": ["name", "sizes"]}).grammar, random.Random(5)
    while (state := grammars.open("bench", grammar)) is None:
        time.sleep(0.01)  # it is compiled in a thread
    states = [state, *[grammars.open("bench", grammar) for _ in range(1, ROWS)]]
    cpu_s, made = 0.0, 0
    for _ in range(STEPS):
        rows = {row: state for row, state in enumerate(states) if state and not state.is_complete}
        began_s = time.process_time()
        masks = grammars.masks(rows)
        cpu_s, made = cpu_s + time.process_time() - began_s, made + len(masks)
        for row, mask in masks.items():
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            rows[row].accept(int(generator.choice(allowed)))
    return cpu_s / made
