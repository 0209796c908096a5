"""Each way of a sequence and each policy gives transformers' own tokens, with and without compiled kernels.

One small random model, float32, CPU. Every run counts what happened in it: what it is there for has to have
happened, and nothing of what it leaves out may have.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.forward import PlainForward
from engine.model.loader import load_runner
from engine.model.runner import TorchRunner
from engine.scheduling.policy import POLICIES
from tests.integration.exactness import PATHS, Job, Reference, Run, compare, plain_model, random_jobs
from tests.models.random_models import save_random_model

BLOCKS, SCARCE_BLOCKS = 600, 36
SIZES = {"num_blocks": BLOCKS, "block_tokens": 4, "num_host_blocks": 200, "dtype": "float32", "device": "cpu"}
JOBS = random_jobs(40, seed=11, most_tokens=30)


def calm(**changes: object) -> Run:
    """Everything fits, no sequence is disturbed."""
    values: dict[str, object] = {
        "max_batched_tokens": 200,
        "max_sequences": 16,
        "num_blocks": BLOCKS,
        "prefix_caching": False,
        "lease_share": 0.0,
        "move_share": 0.0,
        "tiers": (1,),
        "policy": "fcfs",
    }
    return Run(**{**values, **changes})  # type: ignore[arg-type]


BATCHING = {"batched", "mixed steps", "chunked", "overtook"}
"""Happens wherever several run at once."""
WAYS: dict[str, tuple[Run, set[str], set[str]]] = {
    "one at a time": (calm(max_sequences=1), set(), set()),
    "batched": (calm(), {"batched", "mixed steps"}, set()),
    "chunked": (calm(max_batched_tokens=8, max_sequences=1), {"chunked"}, set()),
    "paused": (calm(lease_share=1.0), {"paused"}, BATCHING),
    "displaced": (calm(max_sequences=2, policy="srpt", tiers=(0, 1, 2)), {"displaced", "overtook"}, BATCHING),
    "swapped": (
        calm(num_blocks=SCARCE_BLOCKS, num_host_blocks=200, policy="vtc"),
        {"swapped out", "swapped in"},
        # Who loses its memory in the very step in which it comes back is computed again.
        BATCHING | {"recomputed"},
    ),
    "recomputed": (calm(num_blocks=SCARCE_BLOCKS, policy="vtc"), {"recomputed"}, BATCHING),
    "prefix hit": (calm(max_sequences=1, prefix_caching=True), {"prefix hit"}, set()),
    "adopted from a leader": (
        calm(prefix_caching=True, burst=16),
        {"prefix hit", "adopted", "deferred"},
        BATCHING,
    ),
    "evicted from the cache": (
        calm(max_sequences=1, prefix_caching=True, num_blocks=SCARCE_BLOCKS),
        {"evicted from the cache"},
        {"prefix hit"},
    ),
    "moved with its KV": (calm(move_share=0.05), {"moved with kv"}, BATCHING),
    "moved from host memory": (
        calm(num_blocks=SCARCE_BLOCKS, num_host_blocks=60, policy="vtc", move_share=0.05),
        {"moved from host memory"},
        {*BATCHING, "moved with kv", "moved without kv", "swapped out", "swapped in", "recomputed"},
    ),
    "moved without its KV": (
        calm(num_blocks=SCARCE_BLOCKS, policy="vtc", move_share=0.05),
        {"moved without kv", "recomputed"},
        {*BATCHING, "moved with kv"},
    ),
    "reordered": (calm(max_sequences=2, policy="sjf", predicted=(2, 9, 24)), {"overtook"}, BATCHING),
}
"""By name: the run, what has to happen in it, and what may happen besides."""
IN_ORDER = {"static", "dynamic", "fcfs"}
"""Policies without overtaking inside a tier."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model("qwen3", tmp_path_factory.mktemp("exactness") / "qwen3")


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> TorchRunner:
    return load_runner(model_dir, **SIZES)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(model_dir: Path, runner: TorchRunner) -> Reference:
    return Reference(plain_model(model_dir), runner.info.eos_token_ids)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_by_itself_gives_generates_tokens(
    way: str, runner: TorchRunner, reference: Reference
) -> None:
    run, wanted, besides = WAYS[way]
    met = compare(reference, runner, JOBS, [run])
    assert all(met[path] > 0 for path in wanted), met
    assert {path for path in PATHS if met[path]} <= wanted | besides, met


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_gives_generates_tokens(policy: str, runner: TorchRunner, reference: Reference) -> None:
    runs = [
        Run(
            policy=policy,
            max_batched_tokens=24,
            max_sequences=5,
            seed=seed,
            num_blocks=SCARCE_BLOCKS,
            num_host_blocks=12,
            burst=16,
            predicted=(1, 3, 24),
            steps_ahead=steps_ahead,
        )
        for seed, steps_ahead in ((1, 0), (2, 1))
    ]
    met = compare(reference, runner, JOBS, runs)
    assert met["batched"] > 0, met
    assert met["paused"] > 0, met
    assert met["prefix hit"] > 0, met
    assert met["swapped in"] + met["recomputed"] > 0, met
    assert policy in IN_ORDER or met["overtook"] > 0, met


@pytest.mark.parametrize("fast_paths", [True, False])
def test_with_the_compiled_kernels_and_without_them(
    fast_paths: bool, model_dir: Path, reference: Reference
) -> None:
    attention = None if fast_paths else "reference"
    runner = load_runner(model_dir, attention=attention, fast_paths=fast_paths, **SIZES)  # type: ignore[arg-type]
    used = {report.name for report in runner.path_reports if report.chosen}
    assert ("attention numba" in used) == fast_paths
    assert isinstance(runner._forward, PlainForward) != fast_paths
    jobs: list[Job] = JOBS[:16]
    run = Run(max_batched_tokens=24, max_sequences=6, num_blocks=SCARCE_BLOCKS, num_host_blocks=24, burst=12)
    met = compare(reference, runner, jobs, [run])
    for path in ("batched", "mixed steps", "chunked", "paused", "swapped in", "prefix hit"):
        assert met[path] > 0, met
