"""The bandwidth of a link, from the exports that tell something of it."""

from __future__ import annotations

import pytest

from engine.client.link_speed import LEAST_BYTES, PRIOR_BYTES_PER_S, LinkSpeed


def test_it_follows_what_large_exports_took_and_small_ones_say_nothing() -> None:
    link = LinkSpeed()
    link.note(LEAST_BYTES - 1, 5.0)
    link.note(0, 5.0)
    assert link.bytes_per_s == PRIOR_BYTES_PER_S
    for _ in range(12):
        link.note(1 << 30, 0.5)
    assert link.bytes_per_s == pytest.approx(2 << 30, rel=0.01)
    for _ in range(3):
        link.note(10 << 20, 1.0)
    assert link.bytes_per_s < (2 << 30) / 3, "a link that became slow is soon known as such"
