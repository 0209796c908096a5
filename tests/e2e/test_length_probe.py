"""The length probe that ships with the demo model, on a running server: used, reported, replaced, dropped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from engine.core.learned_state import samples_path
from engine.forecast.length.probe import RANGES
from engine.model.length_probe.probe import FILE_NAME, FORMAT, ProbeWeights
from engine.process.fingerprint import model_fingerprint
from ops.demo.training.evaluate import MODEL_DIRECTORY
from ops.demo.training.streams import held_out_instructions
from tests.support.commands import answer_of
from tests.support.server_process import MODEL, Server, server_process, until

ENGINE = "engine-0"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_dir = tmp_path_factory.mktemp("demo-model") / "model"
    shutil.copytree(MODEL_DIRECTORY, model_dir)
    with server_process(
        tmp_path_factory.mktemp("demo"), model_dir, "--engine-collect-lengths", "yes"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def key(demo: Server) -> str:
    return demo.tenant("asks")


def ask(server: Server, key: str, seed: int, families: dict[str, int], **fields: Any) -> None:
    """Instructions that neither model nor probe was trained on, some at a time."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
    chats = [
        each.chat()
        for family, number in families.items()
        for each in held_out_instructions(family, number, seed)
    ]
    with ThreadPoolExecutor(6) as pool:
        for answer in pool.map(
            lambda chat: client.chat.completions.create(
                model=MODEL, messages=chat, temperature=0, max_tokens=300, **fields
            ),
            chats,
        ):
            assert answer.choices[0].finish_reason in ("stop", "length")


def probe_of(server: Server) -> Any:
    return server.admin("GET", "/forecasts")["engines"][ENGINE]["length_probe"]


def log_of(server: Server) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = server.admin("GET", "/dispatch-log?limit=5000")["records"]
    return records


def test_it_is_on_by_default_and_corrects_what_running_requests_are_charged(demo: Server, key: str) -> None:
    assert probe_of(demo)["state"] == "on"
    ask(demo, key, 1, {"count": 12, "spell": 12, "repeat": 12})
    until(lambda: probe_of(demo)["is_used"])
    ask(demo, key, 2, {"count": 10, "spell": 10, "repeat": 10}, user="ann")
    ask(demo, key, 4, {"count": 4, "spell": 4}, n=2, user="bob")
    until(demo.is_idle)

    records = log_of(demo)
    charged: dict[str, int] = {}
    before = after = 0
    final = {each["request_id"]: each["cost"] for each in records if each["event"] == "settle"}
    for each in records:
        if each["event"] == "dispatch":
            charged[each["request_id"]] = each["predicted_cost"]
        elif each["event"] == "correct" and (known := charged.pop(each["request_id"], None)) is not None:
            # The first one of a request: after its prompt.
            before += abs(known - final[each["request_id"]])
            after += abs(each["cost"] - final[each["request_id"]])
    assert before > 0
    assert after <= before / 2


def test_the_report_says_while_the_server_runs_how_good_it_is(demo: Server) -> None:
    report = answer_of(demo, "forecast", "report")
    assert report["from"] == "server"
    layers = report["gateway"][MODEL]["layers"]
    assert layers["sketches"]["samples"] >= 60
    assert layers["user"]["samples"] >= 30
    probe = report["engines"][ENGINE]["length_probe"]
    assert (probe["is_used"], probe["loaded"], probe.get("problem", "")) == (True, 1, "")
    assert probe["answers"] >= 60
    assert probe["probe"]["pinball_tokens"] <= probe["forecast"]["pinball_tokens"] / 2
    assert probe["probe"]["mean_error_tokens"] <= probe["forecast"]["mean_error_tokens"] / 2
    with demo.http() as client:
        metrics = client.get("/metrics").text
    labels = f'model="{MODEL}",replica="{ENGINE}"'
    assert f"fairgate_length_probe_used{{{labels}}} 1.0" in metrics
    assert f'fairgate_length_probe_pinball_tokens{{forecast="after",{labels}}}' in metrics


def test_a_conversation_is_known_again_by_how_it_began(demo: Server, key: str) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key=key, max_retries=0)
    note = "Remember that the quiet river runs past the old mill and the small harbour. " * 8
    messages: list[Any] = [{"role": "user", "content": f"{note} Spell the word cat."}]
    for _ in range(3):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "Spell the word dog."})
    # The first turn knows no other.
    report = demo.admin("GET", "/forecasts")["gateway"][MODEL]
    assert report["layers"]["conversation"]["samples"] == 2


def test_a_trained_one_takes_over_without_a_restart_and_a_misleading_one_is_not_used(
    demo: Server, key: str
) -> None:
    pid = demo.engine().pid
    ask(demo, key, 5, {"count": 24})
    # What was collected from the answers so far, once it is enough.
    until(samples_path(demo.data_dir, ENGINE).exists)
    trained = answer_of(demo, "forecast", "train", "--model", str(demo.model_dir))
    assert trained["probe"] == str(demo.model_dir / FILE_NAME)
    until(lambda: probe_of(demo)["loaded"] == 2)
    assert probe_of(demo)["trained_on"] == trained["readings"]

    liar(demo.model_dir).save(demo.model_dir / FILE_NAME)
    until(lambda: probe_of(demo)["loaded"] == 3)
    seen = len(log_of(demo))
    ask(demo, key, 3, {"count": 10, "spell": 10, "repeat": 10})
    until(lambda: probe_of(demo).get("answers", 0) >= 30)
    lying = probe_of(demo)
    assert not lying.get("is_used")
    assert lying["probe"]["pinball_tokens"] > 2 * lying["forecast"]["pinball_tokens"]
    assert not [each for each in log_of(demo)[seen:] if each["event"] == "correct"]
    assert demo.engine().pid == pid


def liar(model_dir: Path) -> ProbeWeights:
    """A probe of this model that is sure of one token more, whatever it reads."""
    from safetensors import safe_open

    with safe_open(model_dir / FILE_NAME, framework="pt") as file:
        about = file.metadata()
        width = file.get_tensor("mean").shape[0]
    assert about["format"] == FORMAT
    sure = torch.full((RANGES,), -20.0)
    sure[0] = 20.0
    return ProbeWeights(
        mean=torch.zeros(width),
        deviation=torch.ones(width),
        hidden=torch.zeros(4, width),
        hidden_bias=torch.zeros(4),
        output=torch.zeros(RANGES, 4),
        output_bias=sure,
        fingerprint=model_fingerprint(model_dir),
        layers=tuple(json.loads(about["layers"])),
        samples=1,
    )
