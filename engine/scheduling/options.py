"""Options of policies: bounds, meaning and default of each, said once in its annotation.

Settings, flags, `fairgate policy set --option`, the admin API and the documents are derived from `OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta

from engine.scheduling.batch_or_wait.wait_table import WaitTable

MOST_TOKENS = 1 << 24
MOST_SECONDS = 3600.0
MOST_PROMPTS = 4096

AUTO: Literal["auto"] = "auto"
OptionValue = str | int | float
Prompts = Meta(ge=1, le=MOST_PROMPTS)
Tokens = Meta(ge=1, le=MOST_TOKENS)
Seconds = Meta(ge=0, le=MOST_SECONDS)
RATIO = {"unit": "ratio"}


class BadOption(ValueError):
    """An option that does not exist, or a value that it does not take; the message names both."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """All options; a policy uses what its choices know. Raises ValueError naming field, bounds and value."""

    order: Annotated[str, "Who is next: another order than the policy's own."] = ""
    admit: Annotated[
        str, "Who may run together, and for whom memory is set aside: another choice than the policy's own."
    ] = ""
    compose: Annotated[str, "Who gets the tokens of a step: another choice than the policy's own."] = ""
    evict: Annotated[str, "Who gives way: another choice than the policy's own."] = ""
    max_num_partial_prefills: Annotated[
        int | None,
        Prompts,
        "Prompts that may be unfinished after a step that advanced them. Not set: the policy's own, mostly"
        " 1.",
    ] = None
    max_long_partial_prefills: Annotated[
        int,
        Prompts,
        "Long prompts among those, at most. Has no effect with the composition `token-fair`.",
    ] = 1
    long_prefill_token_threshold: Annotated[
        int,
        Meta(ge=0, le=MOST_TOKENS),
        "A prompt is long above it, and a step takes at most that many of its tokens. 0: with one partial"
        " prompt at a time no prompt is long; with several, above 4 per cent of the model's length. Has no"
        " effect with the composition `token-fair`: see `cap_tokens`.",
    ] = 0
    long_chunk_permille: Annotated[
        int,
        Meta(ge=1, le=1000),
        "Thousandths of the threshold that a step takes of a long prompt. Has no effect with the composition"
        " `token-fair`.",
    ] = 1000
    target_step_s: Annotated[
        float | None,
        Seconds,
        "Prompts get only what keeps a step's predicted time below it. 0: no limit; not set: the policy's"
        " own.",
    ] = None
    least_chunk_tokens: Annotated[
        int, Tokens, "Prompt tokens that go into each step, whatever `target_step_s` says."
    ] = 16
    batch_size: Annotated[
        int,
        Meta(ge=0, le=4096),
        "Requests of a batch that runs to completion. 0: as many as there are places.",
    ] = 0
    window_s: Annotated[float, Seconds, "How long such a batch waits for more requests."] = 0.05
    reserve_permille: Annotated[
        int,
        Meta(ge=0, le=1000),
        "Thousandths of the predicted remaining output for which memory is set aside at admission.",
    ] = 500
    small_lane_permille: Annotated[
        int | None,
        Meta(ge=0, le=500),
        "Thousandths of the KV cache that large sequences leave free for small ones, and that small ones may"
        " take of what large ones are promised. Not set: the policy's own, mostly 0.",
    ] = None
    peak_quantile_permille: Annotated[
        int, Meta(ge=500, le=1000), "Quantile of the remaining output that the peak test goes by."
    ] = 600
    peak_jump_permille: Annotated[
        int, Meta(ge=0, le=500), "By how much a preemption raises the quantile of the peak test."
    ] = 200
    peak_headroom_permille: Annotated[
        int, Meta(ge=0, le=500), "Thousandths of the KV cache that the peak test leaves free."
    ] = 0
    bucket_ratio: Annotated[
        float, Meta(ge=1.1, le=16, extra=RATIO), "Longest to shortest sequence of a length bucket."
    ] = 2.0
    suspend_after_s: Annotated[
        float, Seconds, "How long a short request waits before it suspends a batch of long ones."
    ] = 0.5
    longest_pause_s: Annotated[
        float, Seconds, "After so long no more short requests go before suspended ones."
    ] = 5.0
    slots: Annotated[
        int | Literal["auto"],
        Meta(le=MOST_TOKENS, extra={"auto": AUTO, "least": 0}),
        "Decode tokens that a step of the composition `token-fair` hands out at most. auto: the fewest that"
        " keep 0.9 of a full batch's tokens/s, at least half of the places and 8. 0: what its tokens allow,"
        " less a quarter for prompts.",
    ] = AUTO
    cap_tokens: Annotated[
        int, Tokens, "Tokens of one prompt that a step of it takes at most, while other tenants have prompts."
    ] = 256
    ttft_target_s: Annotated[
        float,
        Seconds,
        "When the first token is due by the slack composition, where the request has no target of its own."
        " 0: it has none.",
    ] = 0.0
    tpot_target_s: Annotated[float, Seconds, "When each further token is due, likewise."] = 0.0
    max_displacements: Annotated[
        int, Meta(ge=0, le=1000), "How often a running sequence is displaced at most."
    ] = 3
    paused_keep_s: Annotated[
        float, Seconds, "How long the KV of a paused sequence is safe from sequences that want to start."
    ] = 2.0
    table: Annotated[
        str,
        Meta(title="a path", pattern=r"[^\0]{0,4096}"),
        "File with a batch-or-wait table (`fairgate policy solve`), which the admit choice `table` looks up;"
        " an engine that is shared reads the same file.",
    ] = ""
    learned_table: Annotated[
        str,
        Meta(title="a path", pattern=r"[^\0]{0,4096}"),
        "File with a learned table (`fairgate policy learn`), which gateways look up with the policy"
        " `learned`; engines do not read it.",
    ] = ""
    batch_or_wait_table: WaitTable | None = None
    """Content of the file `table`, once it is read."""

    def __post_init__(self) -> None:
        for option in OPTIONS.values():
            value = getattr(self, option.name)
            # "not": refuses NaN, too.
            if option.most is None or value is None or value == AUTO == option.default:
                continue
            if not option.least <= value <= option.most:
                raise ValueError(
                    f"{option.name} must be between {option.least:.9g} and {option.most:.9g}, not {value}"
                )
        if self.max_long_partial_prefills > (self.max_num_partial_prefills or MOST_PROMPTS):
            raise ValueError(
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) must not exceed "
                f"max_num_partial_prefills ({self.max_num_partial_prefills})"
            )

    def changed(self) -> dict[str, OptionValue]:
        values = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in values.items() if value != OPTIONS[name].default}


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option, as its annotation says."""

    name: str
    kind: type
    least: float
    most: float | None
    """None: not a number."""
    default: OptionValue | None
    """None: the policy's own."""
    help: str

    @property
    def accepts(self) -> str:
        if self.most is None:
            return "a text"
        auto = f"{AUTO}, or " if self.default == AUTO else ""
        whole = "whole " if self.kind is int else ""
        return f"{auto}a {whole}number from {self.least:.9g} to {self.most:.9g}"

    def parse(self, value: object) -> OptionValue:
        """The value of a text or a number. Raises `BadOption`."""
        if value == AUTO == self.default:
            return AUTO
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            if self.kind is int and isinstance(value, float) and value != int(value):
                raise ValueError
            parsed: OptionValue = self.kind(value)
            if self.most is not None and not self.least <= parsed <= self.most:  # type: ignore[operator]
                raise ValueError
        except (ValueError, OverflowError):
            raise BadOption(f"option {self.name} takes {self.accepts}, not {value!r}") from None
        return parsed


def _rows() -> dict[str, OptionInfo]:
    defaults = {option.name: option.default for option in fields(PolicyOptions)}
    rows: dict[str, OptionInfo] = {}
    for name, hint in get_type_hints(PolicyOptions, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        base, *marks = get_args(hint)
        meta = next((mark for mark in marks if isinstance(mark, Meta)), Meta())
        [help_text] = [mark for mark in marks if isinstance(mark, str)]
        [kind] = [part for part in (get_args(base) or (base,)) if part in (str, int, float)]
        least: Any = meta.ge
        most: Any = meta.le
        default: Any = defaults[name]
        rows[name] = OptionInfo(name, kind, least or 0, most, default, help_text)
    return rows


OPTIONS: Mapping[str, OptionInfo] = _rows()


def parsed_options(values: Mapping[str, object]) -> PolicyOptions:
    """Options of texts and numbers by name; the table is not read. Raises `BadOption`."""
    options: dict[str, Any] = {}
    for name, value in values.items():
        if name not in OPTIONS:
            raise BadOption(f"no option {name[:80]!r}; there are {', '.join(OPTIONS)}")
        options[name] = OPTIONS[name].parse(value)
    try:
        return PolicyOptions(**options)
    except ValueError as error:
        raise BadOption(str(error)) from None
