"""How the engines that `serve` starts share GPUs, cores and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.process.capacity import KvShape, MachineMemory, engine_sizes
from engine.process.options import EngineOptions, EngineSettings
from ops.serving.supervised import divided
from tenants.errors import Invalid


def options(directory: Path, count: int, device: str = "auto") -> EngineOptions:
    return EngineOptions(
        address="ipc:///run/one.sock", model_dir=directory, data_dir=directory, count=count, device=device
    )


def test_one_engine_is_as_it_was(tmp_path: Path) -> None:
    one = options(tmp_path, 1)
    assert divided(one, lambda: ["0", "1"], range(8)) == [one]
    assert (one.cores, one.gpu) == ("", "")


def test_each_has_a_gpu_or_an_equal_share_of_the_cores_and_files_of_its_own(tmp_path: Path) -> None:
    on_cores = divided(options(tmp_path, 2, "cpu"), lambda: ["0", "1"], (1, 2, 3, 6, 7))
    assert [each.cores for each in on_cores] == ["1,2", "3,6"]
    on_gpus = divided(options(tmp_path, 2), lambda: ["GPU-a", "GPU-b", "GPU-c"], range(1))
    assert [(each.gpu, each.cores) for each in on_gpus] == [("GPU-a", ""), ("GPU-b", "")]
    assert [each.engine_id for each in on_gpus] == ["engine-0", "engine-1"]
    assert len({each.address for each in on_gpus}) == 2
    assert EngineOptions.of_arguments(on_gpus[1].arguments()) == on_gpus[1]


@pytest.mark.parametrize(
    ("device", "gpus", "why"),
    [
        ("cpu", ["0", "1", "2"], "is 3, but there are 2 cores here"),
        ("auto", [], "is 3, but there are 2 cores here"),
        ("auto", ["0"], "is 3, but there are 1 GPUs here"),
        ("cuda", [], "is 3, but there are 0 GPUs here"),
        ("cuda:1", ["0", "1", "2"], "engine.device=cuda:1 is one GPU: say cuda"),
    ],
)
def test_more_engines_than_there_is_room_for_are_refused(
    tmp_path: Path, device: str, gpus: list[str], why: str
) -> None:
    with pytest.raises(Invalid, match=why):
        divided(options(tmp_path, 3, device), lambda: gpus, range(2))


def test_engines_share_the_hosts_memory_and_not_the_gpus() -> None:
    shape, memory = KvShape(1_000, 1_000), 10**9
    one, two = EngineSettings(max_sequences=4096), EngineSettings(max_sequences=4096, count=2)
    on_host = MachineMemory("cpu", memory, memory)
    half = MachineMemory("cpu", memory // 2, memory // 2)
    assert engine_sizes(on_host, shape, two) == engine_sizes(half, shape, one)
    on_gpu = MachineMemory("cuda", memory, 10**8, memory)
    assert engine_sizes(on_gpu, shape, two).num_blocks == engine_sizes(on_gpu, shape, one).num_blocks
    assert engine_sizes(on_gpu, shape, two).num_host_blocks < engine_sizes(on_gpu, shape, one).num_host_blocks
