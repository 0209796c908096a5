"""Whether a table is for what is served: by model and kind of machine, as far as both are known."""

from __future__ import annotations

import pytest

from engine.messages import ModelInfo
from gateway.flow.learned.served import misfit, not_compared
from tests.support.learned_tables import learned_table


def info(device: str = "cpu", model_id: str = "org/Llama-3.1-8B-Instruct") -> ModelInfo:
    return ModelInfo(model_id, "llama", 1, 128, 1000, [0], "float32", device, "cpu")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("8b", "chat"), ("Llama-3.1-8B", "chat"), ("chat", "chat"), ("org/llama-3.1-8b-instruct", "x"),
        ("", "x"),
    ],
)  # fmt: skip
def test_a_model_is_known_by_its_words(model: str, name: str) -> None:
    assert misfit(learned_table(model=model), name, [info()]) == ""


@pytest.mark.parametrize("model", ["70b", "chat-8b", "mistral"])
def test_another_model_is_named_with_the_way_out(model: str) -> None:
    assert misfit(learned_table(model=model), "chat", [info()]) == (
        f"the learned table is for the model '{model}', and this is 'chat': fit one for it with"
        " `fairgate policy learn`"
    )


def test_machines_are_compared_by_kind_where_both_are_known() -> None:
    gpu, cpu, profile = (
        learned_table(model="", machine=name) for name in ("8b on 2 x h100", "8b on cpu", "profile a.json")
    )
    assert "for the machine '8b on 2 x h100', and 'm' runs on cpu" in misfit(gpu, "m", [info()])
    assert "for the machine '8b on cpu', and 'm' runs on cuda:0" in misfit(cpu, "m", [info("cuda:0")])
    for table, device in ((gpu, "cuda:0"), (cpu, "cpu"), (profile, "cuda:0"), (profile, "cpu"), (gpu, "")):
        assert misfit(table, "m", [info(device)]) == ""
    assert misfit(gpu, "m", [info("cpu"), info("cuda:1")]) == "", "one of its engines"
    assert misfit(gpu, "m", []) == "", "nothing has announced itself yet"


def test_what_cannot_be_compared_is_said() -> None:
    assert not_compared(learned_table(model="8b", machine="8b on h100")) == ""
    assert not_compared(learned_table(model="8b", machine="profile a.json")) == (
        "the table's machine cannot be compared with what runs here"
    )
    assert not_compared(learned_table(model="", machine="")) == (
        "the table's model and machine cannot be compared with what runs here"
    )
