"""Reads a machine from the step times that an engine learned.

Either what an engine keeps in its data directory (`<engine>.learned.json`), or JSON with the coefficients
`base_s`, `per_token_s`, `per_context_token_s` and `per_sequence_s`, at the top or under `step_time`. Sizes
(`kv_tokens`, `context_tokens`, `max_sequences`, `max_batched_tokens`) may stand beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.messages import StepTime
from engine.step_time.model import StepTimeModel
from ops.simulate.machines.machines import Machine, profile_machine

COEFFICIENTS = ("base_s", "per_token_s", "per_context_token_s", "per_sequence_s")
DEFAULT_SIZES = {"kv_tokens": 65_536, "context_tokens": 8192, "max_sequences": 64, "max_batched_tokens": 512}
MOST_BYTES = 1 << 20
MOST_STEP_S = 60.0


def read_profile(path: Path, defaults: Mapping[str, int] = DEFAULT_SIZES, **sizes: int | None) -> Machine:
    """Given `sizes` precede the file's, these precede `defaults`. Raises `ValueError`."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object")
    step_time = content.get("step_time", content)
    if not isinstance(step_time, dict):
        raise ValueError(f"{path}: step_time must be an object")
    if "coefficients" in step_time:
        try:
            step_time = dict(zip(COEFFICIENTS, _coefficients(step_time), strict=True))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    base_s, per_token_s, context_s, sequence_s = [_seconds(path, step_time, name) for name in COEFFICIENTS]
    if not base_s + per_token_s > 0:
        raise ValueError(f"{path}: base_s or per_token_s must be above 0")
    chosen = {
        name: sizes.get(name) or _whole(path, content, name, default) for name, default in defaults.items()
    }
    known = StepTime(base_s, per_token_s, context_s, sequence_s, samples=1000, relative_error=0.0)
    return profile_machine(f"profile {path.name}", known, **chosen)


def _coefficients(learned: dict[str, Any]) -> list[float]:
    """Mean coefficients of an engine's learned model. Raises ValueError."""
    mean = StepTimeModel.from_dict(learned).mean()
    return [getattr(mean, name) for name in COEFFICIENTS]


def _seconds(path: Path, content: dict[str, Any], name: str) -> float:
    value = content.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value <= MOST_STEP_S:
        raise ValueError(f"{path}: {name} must be between 0 and {MOST_STEP_S:g} seconds, not {value!r}")
    return float(value)


def _whole(path: Path, content: dict[str, Any], name: str, default: int) -> int:
    value = content.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: {name} must be a whole number of at least 1, not {value!r}")
    return value
