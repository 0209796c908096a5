"""Settings of the vLLM plug-in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.vllm_plugin.options import BadPluginSetting, read_settings


def test_defaults() -> None:
    settings = read_settings({})
    assert (settings.policy, settings.slots, settings.places) == ("hybrid", "auto", 0)


def test_all_of_them() -> None:
    settings = read_settings(
        {
            "FAIRGATE_VLLM_POLICY": "vtc",
            "FAIRGATE_VLLM_SLOTS": "16",
            "FAIRGATE_VLLM_PLACES": "48",
            "FAIRGATE_VLLM_OPTIONS": "reserve_permille=1000, cap_tokens=128",
        }
    )
    assert (settings.policy, settings.slots, settings.places) == ("vtc", 16, 48)
    assert (settings.options.reserve_permille, settings.options.cap_tokens) == (1000, 128)
    assert settings.with_slots(settings.options).slots == 16
    assert settings.with_slots(replace(settings.options, slots=0)).slots == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FAIRGATE_VLLM_SLOTS", "many", "FAIRGATE_VLLM_SLOTS takes a whole number from 0"),
        ("FAIRGATE_VLLM_PLACES", "-1", "FAIRGATE_VLLM_PLACES takes a whole number"),
        ("FAIRGATE_VLLM_OPTIONS", "slots", "takes NAME=VALUE"),
        ("FAIRGATE_VLLM_OPTIONS", "speed=3", "FAIRGATE_VLLM_OPTIONS: .*speed"),
        (
            "FAIRGATE_VLLM_OPTIONS",
            "compose=slack,slots=3",
            "FAIRGATE_VLLM_OPTIONS: option slots does nothing",
        ),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: str, message: str) -> None:
    with pytest.raises(BadPluginSetting, match=message):
        read_settings({name: value})
