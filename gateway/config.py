"""Settings and constants of a gateway process, with their bounds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, field

from engine.bounds import Bounded
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import DEFAULT_POLICY
from gateway.flow.control_rules import ControlMode
from gateway.flow.knobs import QueueSettings
from gateway.flow.lanes import LaneRule, long_tokens_of
from gateway.flow.window import WindowRule
from tenants.networks import Network
from tenants.slo.slo import DEFAULT_LEAST_MISSES
from tenants.types import Tier

PERCENT = {"unit": "percent"}
Percent = Annotated[float, Meta(ge=0.01, le=1, extra=PERCENT)]
"""A share, at most 1; as a setting it is written as a whole number of per cent."""
Origin = Annotated[str, Meta(pattern=r"\*|https?://[^/\s,*]+(:\d{1,5})?")]
"""Scheme, host and port of a page, as browsers name it; `*`: any."""
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


AGEING_S = {Tier.INTERACTIVE: math.inf, Tier.STANDARD: 150.0, Tier.BATCH: 180.0}
"""By tier: the wait after which a request moves up one tier, and again after as long; inf: never."""
BEATS_PER_STALE = 5
"""Heartbeats that may be lost in a row before others take a gateway for dead."""


class GatewaySettings(Bounded, frozen=True, kw_only=True):
    """The HTTP server and its queue."""

    max_body_bytes: Annotated[
        int,
        Meta(ge=1024, le=2**30, extra={"unit": "bytes"}),
        "Largest request body; a larger one is refused with 413. With images, where a model's server takes"
        " them, max_body_bytes of that upstream counts instead, and this for the rest of the body.",
    ] = field(default=2**20, name="body_limit")
    head_timeout_s: Annotated[
        float,
        Meta(ge=0.1, le=3_600),
        "How long the head of a request may take to arrive, from its first byte; then 408 and the end of the"
        " connection.",
    ] = field(default=10.0, name="head_timeout")
    idle_timeout_s: Annotated[
        float, Meta(ge=0.1, le=3_600), "A connection without a request for so long is closed."
    ] = field(default=30.0, name="idle_timeout")
    max_connections: Annotated[
        int,
        Meta(ge=0, le=1_000_000, extra={"auto": 0, "least": 8}),
        "Most open connections of clients. One more takes the place of one without a request, those that"
        " never sent a valid key first; where all have requests it is refused with 503. Auto: what the"
        " limit of open files leaves beside database, Redis, engine and upstreams, at most 16,384.",
    ] = 0
    max_connections_per_address: Annotated[
        int,
        Meta(ge=0, le=1_000_000, extra={"auto": 0, "least": 1}),
        "Most open connections of one address (of IPv6: of one /64), and behind trusted proxies most requests"
        " of one address at a time; one more is refused with 429. Auto: half of max_connections.",
    ] = 0
    trusted_proxies: Annotated[
        tuple[Network, ...],
        "Proxies in front of the gateway whose X-Forwarded-For or Forwarded says where a request comes from;"
        " the default trusts none: the address is the connection's.",
    ] = ()
    cors_origins: Annotated[
        tuple[Origin, ...], "Origins of browser applications that may call the API; the default is none."
    ] = ()
    max_choices: Annotated[int, Meta(ge=1, le=128), "Most answers (n) that a request may ask for."] = 8
    max_prompts: Annotated[int, Meta(ge=1, le=2_048), "Most prompts in one request to /v1/completions."] = 16
    max_images: Annotated[
        int, Meta(ge=1, le=1_024), "Most images, sounds, videos and files in one request."
    ] = 16
    max_image_bytes: Annotated[
        int,
        Meta(ge=1024, le=2**30, extra={"unit": "bytes"}),
        "Largest image, sound, video or file in a request, as base64; a larger one is refused.",
    ] = field(default=10 * 2**20, name="image_limit")
    image_addresses: Annotated[
        Literal["no", "public", "yes"],
        "Whether an image may be an http or https address: none, one of a full name in the internet, any. The"
        " server that runs the model looks the name up and fetches it, this gateway never does; see its own"
        " setting for hosts that it may fetch from.",
    ] = "public"
    large_bodies_bytes: Annotated[
        int,
        Meta(ge=2**20, le=2**40, extra={"unit": "bytes"}),
        "Most bytes of request bodies above body_limit that this gateway has at a time, from their arrival to"
        " the end of their answers, half of it for one tenant; one more is refused with 503, or 429.",
    ] = field(default=256 * 2**20, name="large_bodies")
    max_stop_strings: Annotated[int, Meta(ge=1, le=1_024), "Most strings in the stop of a request."] = 16
    special_tokens_in_text: Annotated[
        Literal["text", "refuse", "allow"],
        "What becomes of a special token of the model (end of turn and the like) that a client spells in its"
        " text: it is read as plain text, the request is refused, or it counts as if the template had"
        " written it.",
    ] = "text"
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        "Whose defaults our own engine takes for the temperature, top_p, top_k, min_p and repetition_penalty"
        " that a request does not say: those of the model's generation_config.json, or OpenAI's.",
    ] = "model"
    max_queued: Annotated[
        int, Meta(ge=1, le=1_000_000), "Most requests that wait in the queue, all tenants together."
    ] = 2_048
    max_queued_per_tenant: Annotated[
        int, Meta(ge=1, le=1_000_000), "Most requests of one tenant that wait in the queue."
    ] = 512
    ttl_interactive_s: Annotated[
        float, Meta(ge=0.1, le=86_400), "Longest wait in the queue, tier interactive."
    ] = field(default=120.0, name="ttl_interactive")
    ttl_standard_s: Annotated[float, Meta(ge=0.1, le=86_400), "Longest wait in the queue, tier standard."] = (
        field(default=300.0, name="ttl_standard")
    )
    ttl_batch_s: Annotated[
        float,
        Meta(ge=0.1, le=604_800),
        "Longest wait in the queue, tier batch, where the client names none in X-Fairgate-Timeout-S.",
    ] = field(default=900.0, name="ttl_batch")
    queue: Annotated[
        Literal["shared", "own"],
        "Whether gateways with the same Redis and the same engines share the queue in front of them, so that"
        " together they are as fair as one; own: each gateway shares only among its own requests.",
    ] = "shared"
    long_tokens: Annotated[
        int,
        Meta(ge=0, le=100_000_000, extra={"auto": 0, "least": 1}),
        "Requests with more tokens than this (input and predicted output) wait in a lane of their own, so"
        " that they never hold up the others; auto: 3/4 of the model's context, at most 16,384.",
    ] = 0
    batch_share: Annotated[
        Percent, "Per cent of an engine's sequences and KV cache that the batch tier may hold."
    ] = 1.0
    control: Annotated[
        ControlMode, "Control loop over queue, engines and admission: off, advice (only logged), or acting."
    ] = ControlMode.ADVICE
    admission: Annotated[
        float,
        Meta(ge=0, le=4),
        "Strictness towards targets, at all times and without a control loop that acts: a request is refused"
        " if so many times its expected time (p90) is beyond a target of its tenant and tier; 0: none is.",
    ] = 0.0
    estimates: Annotated[
        bool,
        "Whether requests are told what they will probably wait, take and cost; no: nobody is, nothing is"
        " quoted, and no deadline is refused early.",
    ] = True
    tell_after_s: Annotated[
        float,
        Meta(ge=0, le=86_400),
        "A stream that is expected to wait longer for its turn, or has waited so long, gets its headers and"
        " comments on its wait before its first token.",
    ] = 1.0
    quote_valid_s: Annotated[float, Meta(ge=0.1, le=3_600), "For so long a quote can be redeemed."] = field(
        default=10.0, name="quote_valid"
    )
    quote_credit_share: Annotated[
        float,
        Meta(ge=0, le=1, extra=PERCENT),
        "Per cent of the charge that is credited where a redeemed quote was not kept and that is ours.",
    ] = field(default=0.5, name="quote_credit")
    quote_credit_usd: Annotated[
        float,
        Meta(ge=0, le=1_000_000, extra={"unit": "usd"}),
        "Most that is credited to one tenant for missed quotes in a day (UTC), in US dollars; what is due"
        " beyond it is not credited, and the account says so.",
    ] = field(default=10.0, name="quote_credit_usd_per_day")
    engine_hour_usd: Annotated[
        float,
        Meta(ge=0, le=1_000_000, extra={"unit": "usd"}),
        "What an hour of one engine or server costs you, in US dollars; 0: not known. The console compares it"
        " with what tenants were charged; nothing is charged by it.",
    ] = 0.0
    reservation_burst_s: Annotated[
        float,
        Meta(ge=0, le=3_600),
        "A tenant that was kept from its reserved tokens per second is owed at most those of so many"
        " seconds.",
    ] = field(default=10.0, name="reservation_burst")
    session_idle_s: Annotated[
        float, Meta(ge=60, le=2_592_000), "A person's session in the console ends when unused for so long."
    ] = field(default=43_200.0, name="session_idle")
    session_max_s: Annotated[
        float,
        Meta(ge=60, le=31_536_000),
        "A person's session in the console ends so long after the log-in, however it is used.",
    ] = field(default=604_800.0, name="session_max")
    alert_misses: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        "An alert on a missed target needs at least so many misses in its long window: with little traffic a"
        " single one would burn a month's error budget.",
    ] = DEFAULT_LEAST_MISSES
    alert_every_s: Annotated[
        float,
        Meta(ge=0.2, le=300),
        "So often the server looks whether an alert fires or is over. Of several gateways one does; where it"
        " dies, another one after three times as long.",
    ] = field(default=30.0, name="alert_every")
    backup_late_s: Annotated[
        float,
        Meta(ge=0, le=31_536_000),
        "An alert fires where the newest backup is older than this, or where a database of that age has"
        " none; 0: never, where something else than `fairgate backup` copies the database.",
    ] = field(default=129_600.0, name="backup_late")
    webhook_private: Annotated[
        bool,
        "Whether webhooks may have http and private addresses: then all who may add one can make the"
        " server send requests inside your network.",
    ] = False
    webhook_timeout_s: Annotated[
        float, Meta(ge=0.5, le=30), "A webhook that has not answered for so long is tried again later."
    ] = field(default=10.0, name="webhook_timeout")
    console_url: Annotated[
        str,
        Meta(
            title="https or http, a host and where needed a port, such as https://fairgate.example.org",
            pattern=r"(https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(:\d{1,5})?)?",
        ),
        "Where browsers reach the console: links by which people set a password begin with it. The default"
        " goes by the Host of the request, and on the command line by the address that the server listens"
        " on.",
    ] = ""
    trace_url: Annotated[
        str,
        Meta(
            title="an address with {request_id} in it, such as https://traces.example.com/search?id={request_id};"
            " empty: no link",
            pattern=r"(https?://\S*\{request_id\}\S*)?",
        ),
        "Where the trace of a request is shown: the console links to it from a request's page. Spans have the"
        " id as fairgate.request_id.",
    ] = ""
    gateway_stale_s: Annotated[
        float,
        Meta(ge=3, le=3_600),
        "A gateway that has been silent for so long is taken for dead: others that share its database and"
        " engine settle what it left.",
    ] = field(default=15.0, name="stale")
    lease_ttl_s: Annotated[
        float,
        Meta(ge=1, le=3_600),
        "How long the quota store keeps what a silent gateway holds before anybody looks after it.",
    ] = field(default=60.0, name="lease")
    store_failure: Annotated[
        Literal["closed", "local"],
        "What happens while Redis cannot be reached: closed refuses every request, local admits within a"
        " slice of each limit that each gateway counts for itself.",
    ] = "closed"
    local_slice: Annotated[
        int,
        Meta(ge=1, le=100),
        "Per cent of each limit that one gateway may give out while Redis cannot be reached, where"
        " store_failure is local; a hard limit is exceeded by at most so much for each gateway.",
    ] = 10
    max_end_users: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        "Most end users of a tenant with counters in use at a time, where limits are set on end users. One"
        " more takes the place of one at rest; where none is, it is refused.",
    ] = 10_000
    idempotency_ttl_s: Annotated[
        float,
        Meta(ge=0, le=30 * 86_400),
        "How long answers to requests with an Idempotency-Key are kept; 0: such requests are refused.",
    ] = field(default=86_400.0, name="idempotency_ttl")
    idempotent_bytes: Annotated[
        int,
        Meta(ge=2**16, le=2**40, extra={"unit": "bytes"}),
        "Most bytes of answers, compressed, that are kept under one tenant's idempotency keys; with 7/8 of it"
        " in use a request with a new key is refused.",
    ] = 128 * 2**20
    slow_reader_s: Annotated[
        float,
        Meta(ge=0.1, le=3_600),
        "A client that reads nothing of its stream for so long, while more waits for it, is cut.",
    ] = field(default=30.0, name="slow_reader")
    moves: Annotated[
        int,
        Meta(ge=0, le=100),
        "How often one request may go on at another engine after its own was lost or drained; then it ends"
        " with what arrived. 0: never.",
    ] = 3
    max_buffered_events: Annotated[
        int,
        Meta(ge=1, le=100_000),
        "Pieces of a stream that wait for a client which does not read; then the engine rests.",
    ] = 512
    timeline_retention_s: Annotated[
        float,
        Meta(ge=0, le=3650 * 86_400, extra={"unit": "days"}),
        "Days for which the timelines of requests that have ended are kept (numbers, no text); 0: none is.",
    ] = field(default=7 * 86_400.0, name="timeline_days")
    max_timelines: Annotated[
        int, Meta(ge=1, le=1_000_000_000), "Most timelines that are kept; the oldest go first."
    ] = 1_000_000
    shutdown_grace_s: Annotated[
        float, Meta(ge=0, le=3_600), "On SIGTERM: how long running requests may still take to end."
    ] = field(default=20.0, name="drain")

    @property
    def beat_s(self) -> float:
        """Time between two heartbeats: some may be lost before others take this gateway for dead."""
        return self.gateway_stale_s / BEATS_PER_STALE

    @property
    def queue_ttl_s(self) -> dict[Tier, float]:
        """Longest wait in the queue by tier; a request that waited longer is refused with 503."""
        return {
            Tier.INTERACTIVE: self.ttl_interactive_s,
            Tier.STANDARD: self.ttl_standard_s,
            Tier.BATCH: self.ttl_batch_s,
        }


class AuditSettings(Bounded, frozen=True, kw_only=True):
    """How often the audit is signed and checked, and the ledger digested."""

    checkpoint_rows: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        "After so many new rows the audit gets a signed checkpoint. Where a row was changed, the check names"
        " the rows between two checkpoints.",
    ] = 100
    checkpoint_s: Annotated[
        float,
        Meta(ge=1, le=86_400),
        "A new row of the audit is signed after so long at the latest.",
    ] = field(default=60.0, name="checkpoint_every")
    ledger_s: Annotated[
        float,
        Meta(ge=1, le=86_400),
        "The audit gets a digest of new rows of the ledger after so long, or of each 10,000 of them. Until"
        " then it does not show that one of them was changed.",
    ] = field(default=600.0, name="ledger_every")
    verify_s: Annotated[
        float,
        Meta(ge=60, le=2_678_400),
        "The whole audit is checked at the start and after so long, as `fairgate audit verify` does it;"
        " damage is an alert.",
    ] = field(default=86_400.0, name="verify_every")


class GatewayConfig(GatewaySettings, frozen=True, kw_only=True):
    """What one gateway process runs with: its settings, and constants that only tests change."""

    policy: str = DEFAULT_POLICY
    """Scheduling policy of the queue, by its name in `engine.scheduling.policy`."""
    policy_options: PolicyOptions = field(default_factory=PolicyOptions)
    """Of that policy, as the settings say; `fairgate policy set` may have stored another policy since."""
    data_dir: Path | None = None
    """Where the length forecast is kept between runs; None: it is not kept."""

    audit: AuditSettings = field(default_factory=AuditSettings)
    body_timeout_s: Seconds = 30.0
    prompt_threads: Count = 2
    """For prompts of more than 4 KB. Tenants take turns, and one has at most all threads but one."""
    max_inputs: Count = 2048
    """Inputs to /v1/embeddings, or documents to /v1/rerank, in one request."""
    max_messages: Count = 2048
    max_stop_characters: Count = 128
    max_top_logprobs: Count = 20
    max_logit_bias: Count = 1024

    long_share_sequences: Percent = 0.5
    long_share_kv: Percent = 0.5
    """Shares of an engine's sequences and KV cache that long requests of a tier and those above may hold."""
    lookahead_sequences: Annotated[int, Meta(ge=0)] = 2
    """Sequences dispatched beyond what an engine runs at once, so that it never idles between steps."""
    kv_window: Annotated[float, Meta(gt=0)] = 1.0
    """Predicted KV tokens in flight may be this share of an engine's KV capacity."""
    engine_grace_s: Seconds = 15.0
    """How long queued requests wait for an engine that is gone before they are refused."""
    dispatch_log_records: Count = 20_000

    reserve_quantile: Percent = 0.9
    """Share of answers for which the first hold is enough, by the length forecast; decoding tops up."""
    max_buffered_bytes: Count = 2**20
    """Bytes of pieces that may wait for a slow client; beyond them the engine rests."""
    hold_wait_s: Seconds = 5.0
    """Longest wait of a top-up for what other requests hold on a window; then it counts as refused."""
    accounts_wait_s: Seconds = 30.0
    """Longest wait of a running request for a quota store or ledger that is away; then it is stopped."""
    outcome_wait_s: Seconds = 10.0
    """After a cancel: how long the engine's final count is awaited before the received count is charged."""
    settle_wait_s: Seconds = 10.0
    """How long an answer waits for its settlement to be durable; the settlement itself goes on."""
    write_timeout_s: Seconds = 120.0
    """A client that reads nothing for this time counts as disconnected."""
    keep_alive_s: Seconds = 5.0
    """Silence in a stream after which an SSE comment is sent."""
    idempotency_wait_s: Seconds = 300.0
    """Longest wait of a repeated request for a run that has not ended."""
    max_idempotent_answer_bytes: Count = 1024 * 1024
    max_idempotency_keys: Count = 10_000
    """Of one API key, at any time."""
    estimate_cache_s: Annotated[float, Meta(ge=0)] = 0.05
    quotes_per_s: Seconds = 5.0
    """`POST /v1/quotes` per tenant, sustained; bursts of twice that."""
    token_calls_per_s: Seconds = 20.0
    """`/tokenize` and `/detokenize` per tenant, sustained; bursts of twice that."""

    def queue_settings(self, context_tokens: int | None = None) -> QueueSettings:
        """Of the queue in front of replicas with this context; None: none has announced itself yet."""
        return QueueSettings(
            self.max_queued,
            self.max_queued_per_tenant,
            [self.queue_ttl_s[tier] for tier in Tier],
            WindowRule(self.lookahead_sequences, self.kv_window),
            self.dispatch_log_records,
            [AGEING_S[tier] for tier in Tier],
            LaneRule(
                self.long_tokens or long_tokens_of(context_tokens),
                self.long_share_sequences,
                self.long_share_kv,
                self.batch_share,
            ),
            self.reservation_burst_s,
        )
