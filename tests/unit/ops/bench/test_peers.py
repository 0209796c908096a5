"""The runners' shared loop, protocol and choice of peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.bench.common.errors import CannotBench
from ops.bench.engine.models import NoModel, find_model, read_config
from ops.bench.engine.process import EngineFailed, EngineLaunch, engine_process
from ops.bench.engine.run import EngineBenchOptions, installed_peers, run
from ops.bench.engine.workload import SHIPPED_WORKLOAD
from ops.bench.peers.stdio import drive


class Counting:
    """An engine that gives each request one token a step, the number of the step."""

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self.steps = 0
        self.submitted: list[int] = []

    def submit(self, index: int, request: dict[str, Any]) -> None:
        self.open[index] = request["output_tokens"]
        self.submitted.append(index)

    def has_work(self) -> bool:
        return bool(self.open)

    def step(self) -> list[tuple[int, list[int]]]:
        self.steps += 1
        found = [(index, [self.steps]) for index in self.open]
        self.open = {index: left - 1 for index, left in self.open.items() if left > 1}
        return found


def request(output_tokens: int, arrival_s: float) -> dict[str, Any]:
    return {"prompt_token_ids": [1], "output_tokens": output_tokens, "arrival_s": arrival_s}


def test_requests_are_submitted_in_the_order_of_their_arrival() -> None:
    engine = Counting()
    answers = drive(engine, [request(2, 0.02), request(3, 0.0), request(1, 0.02)])
    assert engine.submitted == [1, 0, 2]
    assert [len(answer["token_ids"]) for answer in answers] == [2, 3, 1]
    for answer in answers:
        assert len(answer["token_s"]) == len(answer["token_ids"])
        assert answer["token_s"] == sorted(answer["token_s"])
    assert answers[1]["token_ids"] == [1, 2, 3]
    assert min(answers[0]["token_s"][0], answers[2]["token_s"][0]) >= 0.02, "not before they arrived"


def test_the_time_in_which_an_engine_has_nothing_to_do_is_passed_over() -> None:
    engine = Counting()
    an_hour_s = 3600.0
    answers = drive(engine, [request(1, an_hour_s), request(2, 0.0), request(1, 2 * an_hour_s)])
    assert engine.submitted == [1, 0, 2]
    assert [answer["token_ids"] for answer in answers] == [[3], [1, 2], [4]]
    for answer, arrival_s in zip(answers, (an_hour_s, 0.0, 2 * an_hour_s), strict=True):
        assert arrival_s <= answer["token_s"][0] < arrival_s + 60.0


def test_all_at_once_means_in_one_step() -> None:
    engine = Counting()
    answers = drive(engine, [request(1, 0.0), request(1, 0.0)])
    assert [answer["token_ids"] for answer in answers] == [[1], [1]]
    assert engine.steps == 1


def _launch(code: str) -> EngineLaunch:
    return EngineLaunch("a peer", (sys.executable, "-c", code), Path.cwd(), {"threads": 1})


@pytest.mark.parametrize(
    ("code", "timeout_s", "says"),
    [
        (
            "import sys; sys.exit('no such library')",
            30.0,
            "a peer ended before it answered:\nno such library",
        ),
        (f"input(); print({json.dumps(json.dumps({'error': 'KeyError: x'}))})", 30.0, "a peer: KeyError: x"),
        ("import sys; sys.stdin.read()", 0.2, r"a peer gave no answer in 0\.2 s"),
    ],
)
def test_what_a_process_complains_of_reaches_the_user_and_one_that_never_answers_is_ended(
    code: str, timeout_s: float, says: str
) -> None:
    with (
        engine_process(_launch(code), timeout_s=timeout_s) as process,
        pytest.raises(EngineFailed, match=says),
    ):
        process.load({})


LINGERING = """
import threading, time
from ops.bench.peers.stdio import serve

class Engine:
    def load(self, options):
        threading.Thread(target=time.sleep, args=(600,)).start()
        print("a library says hello")
        return {"name": "lingering"}

serve(Engine())
"""


def test_an_engine_whose_threads_linger_ends_with_its_orders() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LINGERING], input='{"do": "load"}\n', capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert process.stdout == '{"about": {"name": "lingering"}}\n', "what libraries print is no answer"


def test_a_program_that_is_not_there() -> None:
    launch = EngineLaunch("a peer", ("/nonexistent/python",), Path.cwd(), {"threads": 1})
    with pytest.raises(EngineFailed, match="a peer cannot be started"), engine_process(launch, timeout_s=1.0):
        pass


def _options(tmp_path: Path, **fields: Any) -> EngineBenchOptions:
    return EngineBenchOptions(
        **{"model": "micro", "workload": SHIPPED_WORKLOAD, "peers_dir": tmp_path, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"peers": ("openvino",)}, "peer 'openvino' is not installed in .*make bench-peers"),
        ({"peers": ("vllm",)}, "no peer 'vllm'; there are transformers, openvino"),
        ({"policy": "nonsense"}, "no policy 'nonsense'"),
        (
            {"policy": "fcfs", "max_sequences": 64, "max_batched_tokens": 8},
            r"max_sequences \(64\) must not exceed",
        ),
        ({"model": "huge"}, "'huge' is neither a model directory nor one of micro, tiny, small"),
        ({"workload": Path("none.json")}, r"none\.json cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CannotBench, match=says):
        run(_options(tmp_path, **({"peers": ()} | fields)))
    assert not (tmp_path / "cache").exists(), "no model was made for it"


def test_transformers_comes_with_the_engine(tmp_path: Path) -> None:
    assert installed_peers(tmp_path) == ["transformers"]
    interpreter = tmp_path / "openvino" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    assert installed_peers(tmp_path) == ["transformers", "openvino"]


def test_a_model_directory_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}', encoding="utf-8")
    assert find_model(str(tmp_path), tmp_path / "cache") == tmp_path.resolve()
    with pytest.raises(NoModel, match="does not say max_position_embeddings"):
        read_config(tmp_path)
