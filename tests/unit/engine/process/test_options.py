"""Tests of the options of an engine process: as arguments, and their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.process.options import EngineOptions

GIVEN: dict[str, Any] = {"model_dir": Path("/models/m"), "data_dir": Path("/data"), "address": "ipc:///run/e"}


def test_options_come_back_from_their_arguments() -> None:
    options = EngineOptions(
        **GIVEN, collect_lengths=True, num_blocks=7, orphan_s=1.5, policy_options='{"slots": 4}'
    )
    assert EngineOptions.of_arguments(options.arguments()) == options
    assert options.arguments()[options.arguments().index("--data-dir") + 1] == "/data"


@pytest.mark.parametrize(
    "arguments",
    [["--thread", "1"], ["--threads"], ["--threads", "x"], ["--max-sequences", "-1"], ["--serve", "2"]],
)
def test_arguments_that_are_no_options_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match=r"thread|serve|max_sequences|argument"):
        EngineOptions.of_arguments([*EngineOptions(**GIVEN).arguments(), *arguments])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("niceness", 20), ("orphan_s", float("nan")), ("engine_id", "a/b"), ("block_tokens", -1),
        ("max_batched_tokens", 15),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        EngineOptions(**GIVEN, **{name: value})
