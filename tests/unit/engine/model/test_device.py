"""Which device and number format serve, and what is refused with its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.device import card_name, device_of, dtype_of, prepare, why_no_room
from engine.model.loader import _place, _read_config
from engine.process.fingerprint import machine_name
from tests.models.random_models import save_random_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_cards")
def test_a_card_is_taken_where_there_is_one_and_one_that_is_not_there_is_refused() -> None:
    assert device_of(None) == CUDA
    assert device_of("cuda:1") == torch.device("cuda:1")
    assert device_of("cpu") == CPU
    with pytest.raises(ValueError, match=r"'cuda:2' is asked for, but torch sees CUDA devices 0 to 1$"):
        device_of("cuda:2")


@pytest.mark.parametrize(
    ("own", "chosen"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("None", "bfloat16")],
)
def test_on_a_gpu_a_model_keeps_its_half_precision(own: str, chosen: str) -> None:
    assert str(dtype_of(None, CUDA, own)) == f"torch.{chosen}"
    assert dtype_of(None, CPU, own) == torch.float32
    assert dtype_of("float16", CPU, own) == torch.float16


def test_cudnns_attention_is_off_on_cuda_alone() -> None:
    prepare(CPU)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    prepare(CUDA)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_weights_that_no_card_holds_are_refused_with_both_numbers() -> None:
    assert why_no_room(10 * 2**30, 10 * 2**30, CUDA) is None
    problem = why_no_room(15 * 2**30, 10 * 2**30, torch.device("cuda:1"))
    assert problem is not None
    assert "the weights take 15.00 GiB, but on cuda:1 10.00 GiB are free" in problem


def test_a_machine_that_computes_on_a_card_is_named_after_both() -> None:
    assert card_name(CPU) == ""
    assert machine_name(card_name(CPU)) == machine_name()
    assert machine_name("NVIDIA H200") == f"NVIDIA H200; {machine_name()}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_models_own_number_format_is_read_from_its_config(
    tmp_path: Path, request: pytest.FixtureRequest, dtype: torch.dtype
) -> None:
    config = _read_config(save_random_model("llama", tmp_path / "llama", dtype=dtype))
    request.getfixturevalue("two_cards")  # now: a model is not made where torch only claims to have cards
    assert _place("cuda:1", None, config) == (torch.device("cuda:1"), dtype)
