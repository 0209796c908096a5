"""How long a failed event waits."""

from __future__ import annotations

from tenants.outbox.outbox import GIVE_UP_S, LONGEST_RETRY_S, retry_after_s


def test_waits_double_up_to_an_hour() -> None:
    waits = [retry_after_s(attempts) for attempts in range(1, 41)]
    assert waits[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert waits[11:13] == [2_048.0, LONGEST_RETRY_S]
    assert set(waits[12:]) == {LONGEST_RETRY_S}
    assert retry_after_s(10_000) == LONGEST_RETRY_S < GIVE_UP_S
