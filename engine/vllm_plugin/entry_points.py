"""General plug-in of vLLM: gives the engine core the two utility methods that the HTTP endpoint calls."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.vllm_plugin.signature import encode_refusal

NO_CHANNEL = encode_refusal(
    "no_channel",
    "this server has no channel: start it with --scheduler-cls fairgate_vllm.FairScheduler and "
    "FAIRGATE_VLLM_KEY_FILE",
).decode()


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in every process, more than once in some."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.fairgate_exchange = exchange
    EngineCore.fairgate_about = about


def exchange(core: Any, frame: str) -> str:
    """The frame that answers a frame; on the engine core's thread, between two steps."""
    answer = getattr(getattr(core.scheduler, "desk", None), "answer", None)
    if answer is None:
        return NO_CHANNEL
    answered: bytes = answer(frame.encode())
    return answered.decode()


def about(core: Any) -> str:
    """`About` as JSON; empty where there is no channel."""
    desk: Any = getattr(core.scheduler, "desk", None)
    if getattr(desk, "answer", None) is None:
        return ""
    return msgspec.json.encode(desk.about).decode()
