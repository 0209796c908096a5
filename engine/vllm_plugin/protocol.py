"""Messages between a gateway and the vLLM plug-in (msgspec structs, sealed by `signature.py`).

A request's *claims* travel inside it as `vllm_xargs: {"fairgate": "<claims>.<mac>"}`; they say whose request
it is and how many tokens its lease covers. The *channel* carries one message each way, over HTTP (`POST
/fairgate/v1/exchange`) and a UNIX socket (4 bytes of length, big endian, before each frame) alike: an
`Exchange` is answered by a `PluginReport`. An answer repeats the nonce of what it answers, so that it answers
nothing else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from engine.messages import DecodeSlots, SequenceOutcome, TenantShare

PROTOCOL_VERSION = 1
CLAIMS_NAME = "fairgate"
EXCHANGE_PATH = "/fairgate/v1/exchange"
ABOUT_PATH = "/fairgate/v1/about"
MAX_REPORTED_SEQUENCES = 1024
"""Sequences of one report; outcomes come first, and what is left comes with a later report."""
MAX_REPORTED_TENANTS = 2048
"""Tenants in the service of one report; the others come with a later one."""

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ContractClaims(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whose a request is, and what it may have. Fields as in `engine.messages.Submit`."""

    gateway_id: Id
    request_id: Id
    sequence_id: Id
    tenant_id: Id
    lease_tokens: Count
    """Emitted tokens covered so far; token `lease_tokens + 1` is never emitted without a top-up."""
    issued_at_s: Seconds
    """Wall clock of the gateway; a signature is valid once, and only near this time."""
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """As in `Exchange`: the life of the gateway that sent it."""
    life: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """`PluginReport.life` of the one server run that it is valid for; empty: not known yet, valid at any."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    tier: Annotated[int, msgspec.Meta(ge=0, le=2)] = 1
    ttft_target_s: Seconds = 0.0
    tpot_target_s: Seconds = 0.0
    deadline_in_s: float | None = None
    own_deadline_in_s: float | None = None
    predicted_output_tokens: Count = 64
    predicted_high_tokens: Count = 0
    counter: int = 0
    had: int = 0
    heard: int = 0
    is_owed: bool = False
    index: Count = 0
    """Of the sequence in its request: its outcome is charged as that one's."""


class PolicyChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A scheduling policy, with the options that are not the defaults."""

    name: Id
    options: dict[str, str | int | float] = {}


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A gateway's message to the plug-in. Each part may be repeated without harm."""

    gateway_id: Id
    nonce: Annotated[str, msgspec.Meta(min_length=16, max_length=64)]
    """Random; valid once."""
    issued_at_s: Seconds
    protocol_version: int = PROTOCOL_VERSION
    session: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Random, per gateway start; a new one ends the last one's sequences and takes over their outcomes."""
    top_ups: dict[Id, Count] = {}
    """Sequence id -> lease in tokens. Absolute; a lease never shrinks."""
    cancels: dict[Id, str] = {}
    """Sequence id -> cause: `budget`, `cancelled`, `expired` or `failed`."""
    acknowledges: list[Id] = []
    """Sequences whose outcomes are settled; the plug-in forgets them."""
    policy: PolicyChoice | None = None
    """None: as it is."""
    adopt: bool = False
    """Sequences and outcomes of gateways that fell silent become the sender's."""
    life: str = ""
    """`PluginReport.life` of the last report that arrived."""
    report_from: Count = 0
    """`PluginReport.step` of the last report that arrived; 0: none."""


class SequenceNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a sequence is."""

    state: str
    """`running`, `held` (computed, not in the step), `parked` (lease used up), `waiting` or `ended`."""
    emitted_tokens: int
    lease_tokens: int
    request_id: str = ""
    tenant_id: str = ""
    tier: int = 1
    outcome: SequenceOutcome | None = None
    """Of one that ended; repeated until it is acknowledged. `finish` is `budget` where the lease ended it."""


class About(msgspec.Struct, frozen=True, omit_defaults=True):
    """What runs in the server."""

    version: str
    """Of the plug-in."""
    vllm_version: str
    policy: str
    options: dict[str, str | int | float] = {}
    slots: int = 0
    places: int = 0
    not_supported: list[str] = []
    """What this server runs with and the plug-in was never tried with."""
    protocol_version: int = PROTOCOL_VERSION
    nonce: str = ""
    decode_slots: DecodeSlots | None = None


class PluginReport(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The plug-in's answer to an `Exchange`, about the sender's sequences."""

    nonce: str
    life: str
    """Random, per server start: a server with another one holds nothing."""
    about: About
    step: int
    """Position of this report, from 1; `Exchange.report_from` of the next exchange."""
    steps: int = 0
    service: dict[str, TenantShare] = {}
    """By tenant: service of the sender's sequences since `report_from`."""
    sequences: dict[str, SequenceNews] = {}
    """Changes since `report_from` (0: all) and unacknowledged outcomes, `MAX_REPORTED_SEQUENCES` at most."""
    lost_outcomes: int = 0
    """Outcomes of the sender's sequences that had to be forgotten before they were acknowledged."""
    running: int = 0
    held: int = 0
    parked: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    policy_refusal: str = ""
    """Why the exchange's policy was not set."""
    refused_signatures: dict[str, int] = {}
    """Reason -> requests that became the default tenant's: `missing`, `malformed`, `foreign`, `form`, `time`,
    `server`, `replayed`, `running`, `superseded`, `too_many_gateways`."""
    gateways: list[str] = []
    """Live gateways, the sender included."""


class ChannelRefusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an exchange was refused."""

    code: str
    """`signature`, `time`, `replayed`, `protocol_version`, `superseded`, `too_large`, `malformed` or
    `too_many_gateways`."""
    message: str
    protocol_version: int = PROTOCOL_VERSION
