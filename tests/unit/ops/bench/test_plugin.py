"""Pure parts of the benchmark of the plug-in: windows of tokens, fluid shares, what is judged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.bench.common.errors import CannotBench
from ops.bench.plugin.run import VllmBenchOptions, run
from ops.bench.versus.token_windows import fluid_ratio, furthest_off, window_ratios
from ops.cli.main import cli


def test_each_window_is_the_shortest_that_is_long_enough() -> None:
    samples = [(0, 0), (10, 30), (20, 60), (40, 100)]
    assert window_ratios(samples, 40) == [3.0, 3.0, 2.0]
    assert window_ratios(samples, 80) == [3.0, 70 / 30]
    assert window_ratios(samples, 141) == []


def test_a_window_without_the_lighter_tenant_is_no_small_deviation() -> None:
    assert window_ratios([(0, 0), (0, 50)], 40) == [math.inf]
    assert furthest_off([math.inf, 3.0], 3.0) == math.inf


def test_the_furthest_window_counts_on_either_side() -> None:
    assert furthest_off([3.0, 3.03, 2.94], 3.0) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="shorter than one window"):
        furthest_off([], 3.0)


@pytest.mark.parametrize(
    ("light", "heavy", "slots", "ratio"),
    [(32, 32, 16, 3.0), (64, 64, 64, 3.0), (32, 8, 16, 1.0), (2, 32, 16, 7.0), (4, 4, 16, 1.0)],
)
def test_what_one_tenant_cannot_use_is_the_others(light: int, heavy: int, slots: int, ratio: float) -> None:
    assert fluid_ratio(light, heavy, 3.0, slots) == pytest.approx(ratio)


def test_an_unknown_part_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(CannotBench, match="no part 'all'; there are shares, limits, caches, speed"):
        run(VllmBenchOptions(tmp_path, ("all",)))


def test_the_command_says_what_is_not_installed(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", "vllm", "--parts", "caches", "--peers-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "vLLM is not installed" in done.output
