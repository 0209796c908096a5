"""The stand-in device computes as the CPU does, counts what is done to it, shows what is done too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.stand_in_device import DEVICE, StandIn, needs_stand_in
from tests.support.stand_in_streams import Event, Stream

pytestmark = needs_stand_in
FILE = "tests/unit/engine/model/test_stand_in_device.py"


def counting() -> torch.Tensor:
    return torch.arange(4, device=DEVICE)


WAITS: list[tuple[str, Callable[..., Any]]] = [
    ("_local_scalar_dense", lambda x: x[2].item()),
    ("_local_scalar_dense", lambda x: bool(x[2] > 1)),
    ("copy to the host", lambda x: x.tolist()),
    ("copy to the host", lambda x: x.cpu()),
    ("copy to the device", lambda x: torch.tensor([1, 2], device=DEVICE)),
    ("copy to the device", lambda x: torch.ones(2).to(DEVICE)),
    ("copy to the device", lambda x: x[[0, 1]]),
    ("copy to the device", lambda x: x[torch.tensor([0, 1])]),
    ("index", lambda x: x[x > 1]),
    ("nonzero", lambda x: x.nonzero()),
    ("masked_select", lambda x: x.masked_select(x > 1)),
    ("_unique2", lambda x: x.unique()),
    ("repeat_interleave", lambda x: torch.repeat_interleave(x)),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("name", "wait"), WAITS)
def test_every_wait_is_reported_with_its_line(name: str, wait: Callable[..., Any], late: bool) -> None:
    with StandIn(late=late) as device, torch.inference_mode():
        wait(counting())
        assert device.unexpected_waits() == [f"{FILE}:{wait.__code__.co_firstlineno} {name}"]


def a_step(staging: torch.Tensor, result: torch.Tensor) -> Event:
    """Copies in, computes by every way of writing that needs no wait, copies out."""
    given = torch.empty(4, dtype=torch.int32, device=DEVICE).copy_(staging, non_blocking=True)
    rows = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    rows.index_copy_(0, given.long(), counting()).index_put_((given,), counting() * 2, accumulate=True)
    rows[rows > 100] = 0
    rows = torch.repeat_interleave(rows, torch.ones_like(rows), output_size=4).scatter_(0, counting()[:1], 7)
    total = torch.cat([rows, rows.gather(0, counting())]).cumsum(0).topk(1).values
    scores = torch.where(rows > 0, rows, total)[None].float().log_softmax(-1)
    result.copy_(scores.argmax(-1), non_blocking=True)
    (done := Event(enable_timing=True)).record()
    return done


@pytest.mark.parametrize("late", [False, True])
def test_a_step_without_waits_is_counted(late: bool) -> None:
    staging, result = torch.tensor([3, 2, 1, 0], dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    with StandIn(late=late) as device:
        (begun := Event()).record()
        done = a_step(staging, result)
        assert done.query() is not late
        done.synchronize()
        assert result.tolist() == [3]
        assert (device.unexpected_waits(), device.event_waits.total()) == ([], 1)
        assert list(device.bytes_to_device.values()) == [16]
        assert list(device.bytes_to_host.values()) == [8]
        assert begun.elapsed_time(done) == device.launches.total() > 20
        assert any(name.endswith(" topk") and name.startswith(FILE) for name in device.launches)
        assert device.views > 0


def test_the_cpus_tensors_are_refused() -> None:
    with StandIn():
        numbers = counting()
        for mixed in (
            lambda: numbers + torch.ones(4),
            lambda: torch.ones(4).add_(numbers),
            lambda: torch.ones(4)[numbers],
            lambda: numbers.index_copy_(0, numbers, torch.ones(4)),
        ):
            with pytest.raises(RuntimeError, match=f"aten.*{FILE}:{mixed.__code__.co_firstlineno}"):
                mixed()
        with pytest.raises(NotImplementedError, match="in place"):
            numbers.unsqueeze_(0)
        assert (
            torch.zeros_like(numbers, device="cpu").add_(1).numpy().tolist()
            == numbers.histc(4).tolist()
            == [1] * 4
        )
        assert (torch.tensor([2**30], dtype=torch.int32, device=DEVICE) * 7 >> 1).tolist() == [-(2**29)]


def test_what_is_read_or_written_too_early_shows() -> None:
    staging, result = torch.tensor([3, 2, 1, 0], dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    with StandIn(late=True):
        done = a_step(staging, result)
        assert result.tolist() == [-999_999]
        staging.copy_(torch.tensor([1, 0, 2, 3]))
        done.synchronize()
        assert result.tolist() == [1], "what the buffer held in the end"
        assert torch.empty(2, device=DEVICE).isnan().all(), "memory that was not written"
        doubled = counting() * (number := torch.tensor(2))
        number.fill_(9)
        assert doubled.tolist() == [0, 2, 4, 6], "a number is handed over at the launch"
        doubled.add_(1)
    with StandIn():
        assert doubled.tolist() == [1, 3, 5, 7], "what was queued is done in the end"


def test_streams_wait_for_each_other_only_where_said() -> None:
    with StandIn(late=True) as device:
        source, copies = torch.full((2,), 5, device=DEVICE), Stream()
        results = [torch.empty(2, dtype=torch.int64) for _ in range(2)]
        for result, in_order in zip(results, (False, True), strict=True):
            if in_order:
                copies.wait_stream(device.current_stream)
            with device.stream(copies):
                result.copy_(source, non_blocking=True)
            copies.synchronize()
        assert [result.tolist() for result in results] == [[-999_999] * 2, [5, 5]]
        assert copies.ms == device.host_ms == 1.0
        device.host_ms += 2.5
        counting()
        assert device.current_stream.ms == 4.5


def test_launches_fail_as_on_a_device() -> None:
    with StandIn() as device:
        device.fail_next(ValueError("broken"), after=1)
        numbers = counting()
        with pytest.raises(ValueError, match="broken"):
            numbers.add_(1)
        assert numbers.tolist() == [0, 1, 2, 3]
    with StandIn(late=True) as device:
        device.fail_next(torch.OutOfMemoryError("full"))
        with pytest.raises(torch.OutOfMemoryError):
            counting()
        device.fail_next(ValueError("gone"), lost=True)
        numbers = counting()
        for _ in range(2):
            with pytest.raises(ValueError, match="gone"):
                numbers.tolist()
        with pytest.raises(ValueError, match="gone"):
            counting()
