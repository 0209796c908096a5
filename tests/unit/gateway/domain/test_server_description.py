"""Descriptions are read back as they were written, and of other versions are refused by name."""

from __future__ import annotations

import msgspec
import pytest

from gateway.config import GatewayConfig
from gateway.domain.server_description import (
    DescribedEngine,
    DescribedQueue,
    RequestTerms,
    ServerDescription,
    UnreadableDescription,
    packed,
    server_of,
    terms_of,
)
from tenants.pricing.pricing import Price, PriceEntry
from tenants.types import Limit, Meter, SubjectKind, Window

ENGINE = DescribedEngine("cpu", 512, 16, 128, 8, 256)
SERVER = ServerDescription(
    "gw_1", "small", False, (ENGINE,), "vtc", {"slots": 4}, DescribedQueue.of(GatewayConfig())
)
TERMS = RequestTerms(
    2.0,
    5.0,
    (
        Limit("lim_1", "ten_a", SubjectKind.TENANT, "ten_a", Meter.TOTAL_TOKENS, 600, rate_per_s=10.5),
        Limit("lim_2", "ten_a", SubjectKind.KEY, "key_1", Meter.REQUESTS, 9, window=Window.DAY),
    ),
    PriceEntry(Price(100, 50, 300), 2_000),
)


def test_both_are_read_back_as_they_were_written() -> None:
    assert server_of(packed(SERVER)) == SERVER
    found = terms_of(packed(TERMS))
    assert found == TERMS
    assert [limit.identity for limit in found.limits] == [limit.identity for limit in TERMS.limits]


def test_what_a_later_program_adds_does_not_hurt() -> None:
    content = msgspec.json.decode(packed(TERMS)) | {"colour": "green"}
    content["limits"][0]["shade"] = "dark"
    assert terms_of(msgspec.json.encode(content)) == TERMS


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (packed(msgspec.structs.replace(SERVER, version=7)), "recorded as version 7, and .* reads version 1"),
        (b"{}", "recorded as version 0"),
        (b"\x93nonsense", "it is damaged"),
        (b'{"version": 1}', "it is damaged: Object missing required field"),
    ],
)
def test_others_are_refused_by_name(content: bytes, why: str) -> None:
    for read in (server_of, terms_of):
        with pytest.raises(UnreadableDescription, match=why):
            read(content)
