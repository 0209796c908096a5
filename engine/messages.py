"""Messages between a gateway and an engine.

msgspec structs, msgpack-encoded, one message a ZeroMQ frame. The engine binds a ROUTER; a gateway connects a
DEALER with a new identity each time, and a second one that carries only `Alive`, from a thread of its own. A
*sequence* is one stream of tokens; a request with `n` choices is `n` sequences that share a `request_id` and
differ in `index`.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 8

#: Tiers by rank: the smaller the rank, the earlier its turn.
TIER_RANKS: dict[str, int] = {"interactive": 0, "standard": 1, "batch": 2}


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters. `temperature` 0 is greedy; `top_k` 0 and `min_p` 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """None: the engine derives one from the sequence id."""
    stop: tuple[str, ...] = ()
    """Text that ends the answer; it is not part of the answer."""
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token (0: only the chosen one); None: off."""
    ignore_eos: bool = False


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer may say (`engine/grammar/source.py`)."""

    source: str
    """In llguidance's JSON form."""
    kept_tokens: int = 0
    """A bound of the tokens that close the answer, wherever it is cut; the lease keeps that number for them.
    0: not known, and an answer that is cut is not closed."""
    growth_tokens: int = 0
    """By how many tokens at most one more token makes that end longer."""
    end_words: tuple[str, ...] = ()
    """What an end may have to say: tried before anything else."""


class Tagged(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="t"):
    """Base of every message; the field `t` is its type."""


# ---------------------------------------------------------------- gateway -> engine


class Hello(Tagged, frozen=True, omit_defaults=True, tag="hello"):
    """Opens a session, one per connection; repeated every `HEARTBEAT_S`, keeps it alive.

    A new session ends the older one of the same `gateway_id`: its sequences are cancelled, `Collect` hands
    out their outcomes, and the older connection is refused (`superseded`). Answered by `Ready`, or by a
    `Refused` with an empty `sequence_id` (`bad_hello`, `protocol_version`, `superseded`,
    `too_many_gateways`).
    """

    gateway_id: str
    protocol_version: int = PROTOCOL_VERSION


class Alive(Tagged, frozen=True, omit_defaults=True, tag="alive"):
    """Keeps the session `Ready.session` alive, from the gateway's liveness thread. Never answered."""

    session: str


class Submit(Tagged, frozen=True, omit_defaults=True, tag="submit"):
    """Run one sequence. Answered by `Step` deltas, or by `Refused`."""

    sequence_id: str
    request_id: str
    tenant_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    lease_tokens: int
    """Emitted tokens covered so far. The engine never emits token `lease_tokens + 1` without a `TopUp`."""
    lease_gpu_us: int | None = None
    """Device microseconds covered so far: the step that reaches it is the last one. None: unlimited."""
    sampling: SamplingParams = SamplingParams()
    index: int = 0
    tier: int = 1
    """Rank, see `TIER_RANKS`."""
    weight: float = 1.0
    counter: int = 0
    """As charged by the gateway (scaled, per weight), predictions included; 0: the engine counts itself."""
    had: int = 0
    """`counter` less what was charged ahead and is not computed yet; steps are composed by it."""
    heard: int = 0
    """The last `TenantShare.serials` of the tenant in this tier that is contained in `had`."""
    is_owed: bool = False
    """Its tenant is below its share: it may take the place of a tenant of its tier that has had more."""
    predicted_output_tokens: int = 64
    """Median of the whole output, as forecast."""
    predicted_high_tokens: int = 0
    """Its 90th percentile; 0: not known."""
    deadline_in_s: float | None = None
    """Seconds from its arrival by which it should be complete; None: no deadline."""
    ttft_target_s: float = 0.0
    """Seconds from its arrival by which its first token is due; 0: no target of its own."""
    tpot_target_s: float = 0.0
    """Seconds after which a further token is due; 0: no target of its own."""
    own_deadline_in_s: float | None = None
    """The client's own deadline, which orders its tenant's sequences only. None: as `deadline_in_s`."""
    prefix_salt: str = ""
    """Prompts share cached prefixes only under the same salt; empty: the tenant's own."""
    trace_context: str | None = None
    """W3C `traceparent`: of the gateway's span that the sequence is part of."""
    grammar: Grammar | None = None
    """Its answer is one of these texts, and ends when no more may follow. None: any text."""
    parts: tuple[str, ...] = ()
    """What is separated from the text by the model's answer form: `reasoning_content`, `tool_calls`."""


class TopUp(Tagged, frozen=True, omit_defaults=True, tag="top_up"):
    """Sets a sequence's lease: absolute, never shrinks. Ignored unless the session owns the sequence."""

    sequence_id: str
    lease_tokens: int
    lease_gpu_us: int | None = None
    """None: as it was."""


class Cancel(Tagged, frozen=True, omit_defaults=True, tag="cancel"):
    """Stops a sequence of the session's. `cause`: `cancelled`, `expired`, `budget` or `failed`."""

    sequence_id: str
    cause: str = "cancelled"


class Acknowledge(Tagged, frozen=True, omit_defaults=True, tag="acknowledge"):
    """Acknowledges settled, durable outcomes; the engine may forget those that are the sender's."""

    sequence_ids: list[str]
    is_traced: bool = False
    """An engine that exports spans makes its own for these."""


class Collect(Tagged, frozen=True, omit_defaults=True, tag="collect"):
    """Asks for `Inventory`. With `adopt`, sequences of lost gateways become the sender's."""

    adopt: bool = False


class SetPolicy(Tagged, frozen=True, omit_defaults=True, tag="set_policy"):
    """Sets the scheduling policy from the next step on, with the options that are not the defaults."""

    name: str
    options: dict[str, str | int | float] = {}


class EngineKnobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a gateway's control loop and learned table may change while an engine runs; defaults: nothing."""

    token_share: float = 1.0
    """Share of `max_batched_tokens` for a step."""
    slot_share: float = 1.0
    """Most decode tokens of a step, as a share of `max_sequences`; 1: the option `slots` decides."""
    partial_prefills: int | None = None
    """Replaces the option `max_num_partial_prefills`."""
    reserve_permille: int | None = None
    """Replaces the option of that name."""


class SetKnobs(Tagged, frozen=True, omit_defaults=True, tag="set_knobs"):
    """Sets all knobs from the next step on; reset when the session that set them ends."""

    knobs: EngineKnobs


class SetBrakes(Tagged, frozen=True, omit_defaults=True, tag="set_brakes"):
    """Replaces what tiers (by rank) may hold; one not named is not braked. It outlives the session."""

    shares: dict[int, float] = {}


class Explain(Tagged, frozen=True, omit_defaults=True, tag="explain"):
    """Asks for `Explained`, with the tokens of the last `steps` steps."""

    steps: int = 0


class Export(Tagged, frozen=True, omit_defaults=True, tag="export"):
    """Takes one of the sender's sequences out of the engine; answered by `Exported`."""

    sequence_id: str
    without_kv: bool = False
    """It is computed again where it goes on."""


class Import(Tagged, frozen=True, omit_defaults=True, tag="import"):
    state: SequenceState


# ---------------------------------------------------------------- engine -> gateway


class ModelInfo(msgspec.Struct, frozen=True):
    model_id: str
    architecture: str
    parameters: int
    context_tokens: int
    vocabulary: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    attention: str
    """The kernel's name and why it was chosen: "name: reason"."""
    forward: str = ""
    """Name of the forward pass."""
    tokenizer: str = ""
    """Fingerprint of its tokenizer's file; empty: not known."""


class Ready(Tagged, frozen=True, omit_defaults=True, tag="ready"):
    """Answers the first `Hello`: the engine serves."""

    engine_id: str
    model: ModelInfo
    policy: str
    block_tokens: int
    num_blocks: int
    max_sequences: int
    max_batched_tokens: int
    pid: int
    protocol_version: int = PROTOCOL_VERSION
    session: str = ""
    """Secret of the session, for `Alive`."""
    life: str = ""
    """Random, of this process: in containers each engine may have the same pid."""
    kv_token_bytes: int = 0
    """Of one token's keys and values in all layers; 0: not known."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One emitted token's log probability, and the best alternatives as (token id, text, logprob)."""

    token_id: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = []


class Decision(msgspec.Struct, frozen=True, array_like=True):
    step: int
    at_s: float
    """The engine's clock."""
    kind: str
    """`admit`, `resume`, `restore` (from host memory), `pause`, `suspend`, `swap` or `preempt`."""
    sequence_id: str
    rule: str
    rank: list[float]
    """Its rank in the order, smaller is earlier; empty if no order was involved."""
    others: list[str]
    """Sequences that it displaced, or that displaced it."""
    displaced_tokens: int = 0
    """Steps (at least a token each) missed so far by those it displaced, or by itself when paused."""


class DecodeShare(msgspec.Struct, frozen=True, array_like=True):
    """How a sequence came by its tokens: one each step, or turns between tenants, with the steps between."""

    floor_tokens: int = 0
    """Tokens of steps that had one for every sequence of its tier."""
    turn_tokens: int = 0
    """Tokens of steps in which tenants took turns by weight."""
    sat_out_own: int = 0
    """Steps without a token: the turns of its tenant went to the tenant's other sequences."""
    sat_out_share: int = 0
    """Steps without a token: its tenant had no turn left, others of the tier had theirs."""
    sat_out_tier: int = 0
    """Steps without a token: higher tiers took the step's slots."""
    sat_out_for: dict[str, int] = {}
    """Tenant id -> steps in which it had the turns meanwhile; those with most. For operators only."""


class SequenceOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence's outcome, kept until acknowledged. Times: seconds since its arrival; None: not reached."""

    sequence_id: str
    request_id: str
    tenant_id: str
    finish: str
    """`stop`, `length`, `budget`, `cancelled`, `expired` or `failed`."""
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    """Prompt tokens computed once (recomputation after a preemption is not counted here)."""
    emitted_tokens: int
    gpu_us: int = 0
    """Its share of the device time of the steps that computed it, recomputation apart."""
    recomputed_gpu_us: int = 0
    index: int = 0
    tier: int = 1
    preemptions: int = 0
    recomputed_tokens: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float = 0.0
    message: str = ""
    stop_string: str = ""
    """The one of the request's that ended its text; empty: none."""
    forced_tokens: int = 0
    """Emitted tokens that its grammar left no choice of: computed as input is, without sampling, and so much
    service."""
    closed: bool = False
    """It was cut, and its end was written so that it is valid by its grammar."""
    finish_word: str = ""
    """A finish reason that says more than `finish`: `tool_calls`, `function_call`, `content_filter`,
    `repetition`."""
    incomplete: str = ""
    """What was cut short: `tool_calls`, `json` or nothing (empty)."""
    trace_context: str | None = None
    decisions: list[Decision] = []
    chunks: list[tuple[float, int]] = []
    """Times and numbers of prompt tokens computed for the first time; if too many, the last are merged."""
    decode: DecodeShare = DecodeShare()
    unread_s: float = 0.0
    """Longest time that it lay unread before its arrival was noted: commands are read between steps."""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence's part of a step."""

    sequence_id: str
    first_index: int = 0
    """Index of `token_ids[0]` among the sequence's emitted tokens; token k is sent once."""
    token_ids: list[int] = []
    text: str = ""
    """Text that is safe to show: never half a character, never the start of a possible stop string."""
    logprobs: list[TokenLogprob] = []
    cached_tokens: int = 0
    gpu_us: int = 0
    """Its device time so far. A delta with nothing else: paused, as its lease of device time is used up."""
    forced_tokens: int = 0
    """As of `SequenceOutcome`, so far."""
    foreseen_tokens: tuple[int, int] | None = None
    """Median and 90th percentile of the whole output, as the length probe predicts; None: no news."""
    parts: tuple[dict[str, Any], ...] = ()
    """Pieces of the answer other than plain text, before `text`: each a delta object of OpenAI's chat stream,
    with `tool_calls`, `function_call`, `reasoning_content` or `reasoning`, `refusal` or `annotations`."""
    outcome: SequenceOutcome | None = None
    """Set on the sequence's last delta."""


class TenantService(msgspec.Struct, frozen=True, array_like=True):
    """Service of one tenant: prompt tokens computed for the first time, tokens emitted."""

    computed_tokens: int
    emitted_tokens: int


class TenantShare(msgspec.Struct, frozen=True, array_like=True):
    """Service of one tenant's sequences of one gateway in one step."""

    computed_tokens: int
    """Prompt tokens computed for the first time."""
    emitted_tokens: int
    serials: dict[int, int] = {}
    """By tier, each of them: all service and lifts of the tenant at this engine so far (scaled, per weight).
    A gateway returns the last one that it knows in `Submit.heard`, so that no token counts twice."""
    lifts: dict[int, int] = {}
    """By tier: the lift in this step (`step_counters.py`; scaled, per weight). Sent to one gateway only."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that one step computed, by tenant; kept for operators."""

    step: int
    at_s: float
    """The engine's clock."""
    slots: int
    """Decode tokens that the step could hand out."""
    decodes: dict[str, int]
    prompts: dict[str, int]
    left_tokens: int
    """What is left of the step's token budget."""
    waiting_decodes: dict[str, int] = {}
    """Decoding sequences that had no token."""
    longest_gap_steps: dict[str, int] = {}
    """The most steps in a row that one of those has gone without a token."""
    waiting_prompt_tokens: dict[str, int] = {}
    """Prompt tokens of running sequences that are left to compute after the step."""
    waiting: dict[str, int] = {}
    """Sequences that still waited for a place after the step; of at most 64 tenants."""
    padding_tokens: int = 0
    """Tokens by which the step was padded."""


class DecodeSlots(msgspec.Struct, frozen=True, omit_defaults=True):
    """Decode tokens that a step of the composition `token-fair` hands out at most."""

    slots: int
    places: int
    is_auto: bool = False
    """The option `slots` leaves it to the measured step time."""
    tokens_per_s: float = 0.0
    """Of a full batch, as predicted; 0: not measured yet."""
    all_tokens_per_s: float = 0.0
    """With a token for each sequence in each step."""


class Step(Tagged, frozen=True, omit_defaults=True, tag="step"):
    """A step's results for one gateway, in one message; `service` by tenant id."""

    step: int
    duration_s: float
    deltas: list[Delta]
    service: dict[str, TenantShare] = {}


class Refused(Tagged, frozen=True, omit_defaults=True, tag="refused"):
    """A `Submit` or `Import` that can never run. `code` is stable, `message` is for people."""

    sequence_id: str
    code: str
    message: str


class RunningSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A live sequence in a snapshot or an inventory."""

    sequence_id: str
    request_id: str
    tenant_id: str
    tier: int
    state: str
    prompt_tokens: int
    computed_tokens: int
    emitted_tokens: int
    max_tokens: int
    predicted_output_tokens: int
    lease_tokens: int = 0
    gateway_id: str = ""


class StepTime(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fitted linear step-time model, seconds: t = base + per_token * tokens + per_context_token *
    attended context + per_sequence * sequences, of the size that the step is padded to"""

    base_s: float
    per_token_s: float
    per_context_token_s: float
    per_sequence_s: float
    samples: int
    relative_error: float
    """Mean absolute relative error over the last samples."""
    graph_sizes: tuple[int, ...] = ()
    """Sequences, ascending, that a step of decodes is padded to; one beyond the last is not padded."""
    mixed_sizes: tuple[int, ...] = ()
    """Tokens that a step with prompts is padded to, likewise."""


class LengthScore(msgspec.Struct, frozen=True):
    """How well one forecast of output lengths did on the answers that ended."""

    pinball_tokens: float
    """Mean pinball loss of its quantiles."""
    mean_error_tokens: float
    """Of its median."""
    p90_coverage: float
    """Share of the answers that were no longer than its 90th percentile."""
    rank_accuracy: float | None = None
    """Of two late answers of unlike length: how often the longer one was expected to be longer."""


class ProbeReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The length probe of an engine: whether it is used, and what it is worth."""

    state: str
    """`on` (a probe fits the model), `collecting` (readings for one are collected) or `off`."""
    problem: str = ""
    """Why the file beside the model is not used, where it was refused."""
    trained_on: int = 0
    """Readings that it was trained on."""
    loaded: int = 0
    """How many probes this engine has taken over so far."""
    is_used: bool = False
    """The gate lets it answer: it did better than the forecast that came with the requests."""
    answers: int = 0
    """Answers since it was loaded that both were judged by."""
    forecast: LengthScore | None = None
    """What came with the requests; None: nothing was judged yet."""
    probe: LengthScore | None = None
    """The same with what the probe read after the prompt."""


class Snapshot(Tagged, frozen=True, omit_defaults=True, tag="snapshot"):
    """The engine's load, sent about 20 times a second, so that quoting needs no round trip."""

    engine_id: str
    step: int
    at_s: float
    """Engine's monotonic clock."""
    running: list[RunningSequence]
    waiting: list[RunningSequence]
    free_blocks: int
    """Blocks without content worth keeping."""
    cached_blocks: int
    """Unused blocks kept for prompts with the same prefix; evicted when free ones run out."""
    referenced_blocks: int
    num_blocks: int
    step_time: StepTime
    service: dict[str, TenantService] = {}
    """Totals since the engine started."""
    preemptions: int = 0
    steps_with_mixed_batch: int = 0
    step_us: int = 0
    """Time of all steps since the engine started."""
    batch_sum: int = 0
    """Sequences of each step, added up."""
    recomputed_tokens: int = 0
    mean_step_time: StepTime | None = None
    """The mean of the last minutes, slow steps included; None: not reported."""
    length_probe: ProbeReport = ProbeReport("off")
    traces_lost: int = 0
    """Kept traces whose spans of this engine the collector does not have."""
    decode_slots: int = 0
    """Most sequences that decode in one step; 0: not reported."""


class Inventory(Tagged, frozen=True, omit_defaults=True, tag="inventory"):
    """Everything a gateway must account for: live sequences, and unacknowledged outcomes."""

    engine_id: str
    running: list[RunningSequence]
    outcomes: list[SequenceOutcome]
    gateways: list[str] = []
    is_partial: bool = False
    """More outcomes follow, or may, once these are acknowledged."""


class SequenceState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a sequence outside an engine: enough to go on in another one, token for token."""

    submit: Submit
    output_token_ids: list[int]
    text_sent: int
    """Characters of `Delta.text` already sent. Of no use for an answer with parts: what its tokens gave was
    sent with them."""
    kv: list[bytes] = []
    """One entry a layer: keys and values of the computed tokens; empty: recompute."""
    kv_tokens: int = 0
    cached_tokens: int = 0
    gateway_id: str = ""
    gpu_us: int = 0
    forced_tokens: int = 0
    recomputed_gpu_us: int = 0


class Exported(Tagged, frozen=True, omit_defaults=True, tag="exported"):
    """Answers `Export`; `state` is None when the engine does not hold the sequence for the sender."""

    sequence_id: str
    state: SequenceState | None


class PolicySet(Tagged, frozen=True, omit_defaults=True, tag="policy_set"):
    """Answers `SetPolicy`; `error` names the known policies when `name` is not one."""

    name: str
    error: str = ""


class Explained(Tagged, frozen=True, omit_defaults=True, tag="explained"):
    policy: str
    choices: dict[str, str]
    decisions: list[Decision] = []
    options: dict[str, str | int | float] = {}
    steps: list[StepRecord] = []
    """The last ones, oldest first."""
    decode_slots: DecodeSlots | None = None
    """None: the composition shares no tokens by weight."""


Command = (
    Hello
    | Alive
    | Submit
    | TopUp
    | Cancel
    | Acknowledge
    | Collect
    | SetPolicy
    | SetKnobs
    | SetBrakes
    | Explain
    | Export
    | Import
)
Event = Ready | Step | Refused | Snapshot | Inventory | Exported | PolicySet | Explained

HEARTBEAT_S = 0.5
"""How often a gateway repeats `Hello`, and its liveness thread `Alive`."""
PATIENCE_S = 30.0
"""Longest standstill of either side's main loop: an engine sends nothing during a step, and a gateway's
liveness thread covers a busy event loop. A process's end is noticed at once, by its connection."""
GATEWAY_LOST_S = 10.0
"""Silence of a gateway's liveness thread after which its sequences are cancelled, their outcomes kept."""

encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode


def decode_command(payload: bytes) -> Command:
    """The command in one frame. Raises `msgspec.DecodeError` and nothing else, whatever the bytes are."""
    try:
        command: Command = _decode_command(payload)
        return command
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def decode_event(payload: bytes) -> Event:
    """The event in one frame. Raises `msgspec.DecodeError` and nothing else, whatever the bytes are."""
    try:
        event: Event = _decode_event(payload)
        return event
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
