"""The check of vLLM's scheduler interface, against what was recorded of its own classes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.vllm_plugin.seam_check import (
    ATTRIBUTES,
    RUN_WITH,
    Found,
    OtherVllm,
    VllmClasses,
    check_instance,
    check_seams,
    differences,
    look,
    not_run_with,
)
from engine.vllm_plugin.vllm_entry import fair_scheduler
from tests.support.vllm_scheduler import FairStandIn, StandInQueue, StandInRequest, StandInScheduler

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "seams.json").read_text())
STAND_IN = VllmClasses(StandInScheduler, StandInQueue, StandInRequest)


def test_what_was_recorded_are_the_versions_that_it_was_run_with() -> None:
    assert tuple(RECORDED) == RUN_WITH


@pytest.mark.parametrize("version", RUN_WITH)
def test_the_recorded_versions_have_every_seam(version: str) -> None:
    assert differences(Found(**RECORDED[version])) == []


@pytest.mark.parametrize("version", RUN_WITH)
def test_the_stand_in_is_like_the_real_classes(version: str) -> None:
    mine, real = asdict(look(STAND_IN)), RECORDED[version]
    for name, parameters in mine.pop("methods").items():
        assert real["methods"][name][: len(parameters)] == parameters
    assert mine.pop("promote")
    for part, names in mine.items():
        assert names == real[part]


@pytest.mark.parametrize(
    ("part", "name", "message"),
    [
        ("methods", "_preempt_request", "the scheduler has no _preempt_request()"),
        ("step_reads", "next_decode_eligible_step", "schedule() does not read next_decode_eligible_step"),
        ("request_attributes", "num_in_flight_tokens", "a request has no num_in_flight_tokens"),
        ("request_properties", "num_tokens", "a request has no num_tokens"),
        ("queue_methods", "peek_request", "the waiting queue has the methods add_request, pop_request"),
    ],
)
def test_each_missing_seam_is_named(part: str, name: str, message: str) -> None:
    found = json.loads(json.dumps(RECORDED["0.32.0"]))
    if part == "methods":
        del found[part][name]
    else:
        found[part].remove(name)
    (difference,) = differences(Found(**found))
    assert difference.startswith(message)


def test_other_parameters_are_a_difference() -> None:
    found = json.loads(json.dumps(RECORDED["0.32.0"]))
    found["methods"]["update_from_output"] = ["outputs"]
    (difference,) = differences(Found(**found))
    assert difference.startswith("update_from_output() takes (outputs), not (scheduler_output,")


def test_another_version_is_refused_with_its_number_and_those_that_work() -> None:
    class Next(StandInScheduler):
        def schedule(self) -> Any:
            return None

    with pytest.raises(OtherVllm, match=r"vLLM 0\.40\.0 has another.*Versions that work: 0\.29\.0, 0\.32\.0"):
        check_seams(VllmClasses(_without(Next, "_free_request"), StandInQueue, StandInRequest), "0.40.0")
    with pytest.raises(OtherVllm, match="the scheduler has no running"):
        check_instance(SimpleNamespace(**{name: 1 for name in ATTRIBUTES if name != "running"}), "0.40.0")


def test_a_version_without_such_modules_is_refused_in_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("vllm")
    old.__version__ = "0.7.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", old)
    with pytest.raises(OtherVllm, match=r"vLLM 0\.7\.1 has another .*vllm\.v1.*Versions that work: 0\.29\.0"):
        fair_scheduler()


def _without(cls: type[Any], name: str) -> type[Any]:
    members = {key: value for each in cls.__mro__[::-1] for key, value in vars(each).items() if key != name}
    return type(cls.__name__, (), {key: value for key, value in members.items() if key != "__dict__"})


@pytest.mark.parametrize(
    ("members", "word"),
    [({"has_speculation": True}, "speculative decoding"), ({"policy_word": "priority"}, "fcfs")],
)
def test_what_could_not_be_counted_is_refused_at_start(members: dict[str, Any], word: str) -> None:
    with pytest.raises(OtherVllm, match=word):
        type("Fair", (FairStandIn,), members)()


@pytest.mark.parametrize(
    ("part", "name", "value", "word"),
    [
        ("vllm_config", "lora_config", "loras", "LoRA"),
        ("parallel_config", "data_parallel_size", 2, "data par"),
    ],
)
def test_what_would_end_the_server_or_hide_its_reports_is_refused(
    part: str, name: str, value: object, word: str
) -> None:
    scheduler = StandInScheduler()
    config = scheduler.vllm_config
    setattr(config if part == "vllm_config" else getattr(config, part), name, value)
    with pytest.raises(OtherVllm, match=word):
        not_run_with(scheduler, "0.32.0")


def test_what_it_was_not_run_with_is_named() -> None:
    scheduler = StandInScheduler()
    assert not_run_with(scheduler, "0.32.0") == []
    assert not_run_with(scheduler, "0.33.1") == ["vLLM 0.33.1 (run with 0.29.0, 0.32.0)"]
    scheduler.vllm_config.parallel_config.data_parallel_size = 2
    scheduler.vllm_config.parallel_config.data_parallel_external_lb = True
    scheduler.use_v2_model_runner = True  # type: ignore[attr-defined]
    scheduler.vllm_config.device_config = SimpleNamespace(device_type="cuda")
    assert not_run_with(scheduler, "0.32.0+cpu") == [
        "the V2 model runner",
        "data parallelism (each rank counts by itself)",
        "a device other than a CPU",
    ]
