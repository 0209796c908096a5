"""The wheel `fairgate-vllm`: built, installed and imported with msgspec as its only dependency."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from ops.cli.main import cli
from ops.vllm_wheel import PACKAGE, CannotBuild, build_wheel, needed_modules

STEPS = """
import sys
sys.path[:0] = sys.argv[1:]
import fairgate_vllm.fair_steps, fairgate_vllm.planner, fairgate_vllm.signature, fairgate_vllm.entry_points
from fairgate_vllm.engine.scheduling.policy import POLICIES
names = {name.partition(".")[0] for name in sys.modules}
assert not names & {"engine", "kernels", "gateway", "ops", "torch", "numpy"}, names
outside = sorted(names - set(sys.stdlib_module_names) - {"fairgate_vllm", "msgspec", "__main__"})
try:
    fairgate_vllm.FairScheduler
except ModuleNotFoundError as error:
    print(error.name, len(POLICIES) > 10, outside)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_it_installs_and_imports_with_msgspec_alone(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(tmp_path), str(wheel)], check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".dist-info")) == [
        PACKAGE
    ]
    # Without site-packages: nothing else can be found.
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    run = [sys.executable, "-I", "-S", "-c", STEPS, str(tmp_path), str(tmp_path / "only")]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1) == ["vllm", "True []\n"]


def test_it_names_the_entry_points_that_vllm_looks_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (text,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert "[vllm.general_plugins]\nfairgate = fairgate_vllm.entry_points:register" in text
    assert "[vllm.endpoint_plugins]\nfairgate = fairgate_vllm.channel.http_endpoint:FairgateEndpoint" in text
    assert all(name.startswith(PACKAGE) for name in names)
    assert len(names) == len(set(names))


def test_equal_sources_make_equal_wheels(wheel: Path, tmp_path: Path) -> None:
    assert build_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_the_command_says_where_it_is(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["plugin", "build", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert Path(json.loads(done.output)["wheel"]).parent == tmp_path
    assert len(list(tmp_path.glob("fairgate_vllm-*.whl"))) == 1


def test_it_does_not_bring_what_a_model_needs() -> None:
    modules = needed_modules(Path(__file__).parents[2])
    assert not [
        name for name in modules if name.startswith(("engine.model", "engine.process", "engine.client"))
    ]


@pytest.mark.parametrize("line", ["import engine.entry", "from gateway.errors import ApiError"])
def test_what_cannot_be_rewritten_is_named(tmp_path: Path, line: str) -> None:
    plugin = tmp_path / "engine" / "vllm_plugin"
    plugin.mkdir(parents=True)
    (tmp_path / "engine" / "__init__.py").touch()
    (plugin / "__init__.py").write_text(f"{line}\n")
    with pytest.raises(CannotBuild, match=r"__init__\.py:1: "):
        build_wheel(tmp_path / "out", tmp_path)
