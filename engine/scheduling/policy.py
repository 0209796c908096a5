"""Named policies: presets of order, admit, compose and evict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from engine.scheduling.admit.base import Admit
from engine.scheduling.admit.buckets import LengthBuckets
from engine.scheduling.admit.peak import PeakAdmit
from engine.scheduling.admit.reserve import PredictedReserve, prompt_only
from engine.scheduling.admit.static import StaticBatch
from engine.scheduling.admit.table import BatchOrWait
from engine.scheduling.admit.window import DynamicWindow
from engine.scheduling.batch_or_wait.table import BatchOrWaitTable
from engine.scheduling.batch_or_wait.table_file import BadTable
from engine.scheduling.compose.base import Compose
from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.lanes import Lanes
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.compose.slack import DeadlineSlack
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.evict.base import Evict
from engine.scheduling.evict.victims import AttainedVictim, FairVictim, LatestVictim
from engine.scheduling.options import AUTO, BadOption, PolicyOptions, parsed_options
from engine.scheduling.order.base import Order, ServiceCountersLike
from engine.scheduling.order.buckets import Buckets
from engine.scheduling.order.dlpm import Dlpm
from engine.scheduling.order.drr import Drr
from engine.scheduling.order.edf import Edf
from engine.scheduling.order.fcfs import Fcfs
from engine.scheduling.order.hrrn import Hrrn
from engine.scheduling.order.hybrid import Hybrid
from engine.scheduling.order.las import Las
from engine.scheduling.order.mlfq import Mlfq
from engine.scheduling.order.priority import Priority
from engine.scheduling.order.sjf import Sjf
from engine.scheduling.order.srpt import Srpt
from engine.scheduling.order.vtc import Vtc

ORDERS: dict[str, Callable[[ServiceCountersLike], Order]] = {
    "fcfs": Fcfs,
    "hrrn": Hrrn,
    "sjf": Sjf,
    "srpt": Srpt,
    "las": Las,
    "mlfq": Mlfq,
    "priority": Priority,
    "edf": Edf,
    "drr": Drr,
    "dlpm": Dlpm,
    "vtc": Vtc,
    "hybrid": Hybrid,
    "buckets": Buckets,
}

HYBRID_OPTIONS = PolicyOptions(max_num_partial_prefills=4, target_step_s=0.2, small_lane_permille=75)
"""Several prompts of a tenant at once; steps at MLPerf's conversational token pace; a lane for small ones."""
OWN_OPTIONS = (
    "max_num_partial_prefills",
    "target_step_s",
    "small_lane_permille",
)

Choice = TypeVar("Choice")


class UnknownPolicy(ValueError):
    """No policy, order or other choice has this name; the message lists those that exist."""


class NeedsTable(UnknownPolicy):
    """This policy looks up a table, and there is none."""


def _table(options: PolicyOptions) -> Admit:
    if options.batch_or_wait_table is None:
        raise NeedsTable(
            "the admit choice 'table' looks up a batch-or-wait table, and none is set: make one with"
            " `fairgate policy solve` and name its file in the setting policy.table"
        )
    return BatchOrWait(options.batch_or_wait_table, size=options.batch_size, memory=_reserve(options))


def _reserve(options: PolicyOptions) -> PredictedReserve:
    return PredictedReserve(
        permille=options.reserve_permille, small_permille=options.small_lane_permille or 0
    )


def _peak(options: PolicyOptions) -> PeakAdmit:
    return PeakAdmit(
        quantile_permille=options.peak_quantile_permille,
        jump_permille=options.peak_jump_permille,
        headroom_permille=options.peak_headroom_permille,
    )


def _buckets(options: PolicyOptions) -> LengthBuckets:
    return LengthBuckets(
        ratio=options.bucket_ratio,
        suspend_after_s=options.suspend_after_s,
        longest_pause_s=options.longest_pause_s,
        memory=_reserve(options),
    )


def _limits(options: PolicyOptions) -> PromptLimits:
    return PromptLimits(
        max_num_partial_prefills=options.max_num_partial_prefills or 1,
        max_long_partial_prefills=options.max_long_partial_prefills,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        target_step_s=options.target_step_s or 0.0,
        least_chunk_tokens=options.least_chunk_tokens,
        long_chunk_permille=options.long_chunk_permille,
    )


ADMITS: dict[str, Callable[[PolicyOptions], Admit]] = {
    "static": lambda options: StaticBatch(size=options.batch_size, memory=_reserve(options)),
    "dynamic": lambda options: DynamicWindow(
        size=options.batch_size, window_s=options.window_s, memory=_reserve(options)
    ),
    "buckets": _buckets,
    "prompt-only": lambda options: prompt_only(),
    "predicted-reserve": _reserve,
    "peak": _peak,
    "table": _table,
}

COMPOSES: dict[str, Callable[[PolicyOptions], Compose]] = {
    "decode-first": lambda options: DecodeFirst(_limits(options)),
    "token-fair": lambda options: TokenFair(
        slots=0 if options.slots == AUTO else options.slots,
        is_auto=options.slots == AUTO,
        cap_tokens=options.cap_tokens,
        target_step_s=options.target_step_s or 0.0,
        least_chunk_tokens=options.least_chunk_tokens,
        max_num_partial_prefills=options.max_num_partial_prefills or 1,
    ),
    "slack": lambda options: DeadlineSlack(options.ttft_target_s, options.tpot_target_s, _limits(options)),
    "lanes": lambda options: Lanes(limits=_limits(options)),
}

_LIMITED = ("decode-first", "slack", "lanes")
COMPOSED_BY: dict[str, tuple[str, ...]] = {
    "slots": ("token-fair",),
    "cap_tokens": ("token-fair",),
    "max_long_partial_prefills": _LIMITED,
    "long_prefill_token_threshold": _LIMITED,
    "long_chunk_permille": _LIMITED,
    "ttft_target_s": ("slack",),
    "tpot_target_s": ("slack",),
}
"""The compositions that use an option; options not named here are used by all."""


EVICTS: dict[str, Callable[[PolicyOptions], Evict]] = {
    "fair-victim": lambda options: FairVictim(),
    "latest-victim": lambda options: LatestVictim(),
    "attained-victim": lambda options: AttainedVictim(),
}


CHOICES: dict[str, Mapping[str, object]] = {
    "order": ORDERS,
    "admit": ADMITS,
    "compose": COMPOSES,
    "evict": EVICTS,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """One choice of each of the four decisions. Choices may keep state: one policy object an engine."""

    name: str
    order: str
    admit: Admit
    compose: Compose
    evict: Evict
    options: PolicyOptions = field(default_factory=PolicyOptions)

    @property
    def claims(self) -> frozenset[str]:
        """What all four choices promise, see `engine.scheduling.claims`."""
        order = make_order(self.order, ServiceCounters())
        return order.claims & self.admit.claims & self.compose.claims & self.evict.claims

    def describe(self) -> dict[str, Any]:
        """The four choices by name, the options that are not the defaults, and what the policy promises."""
        return {
            "policy": self.name,
            "order": self.order,
            "admit": self.admit.name,
            "compose": self.compose.name,
            "evict": self.evict.name,
            "options": self.options.changed(),
            "claims": sorted(self.claims),
        }


@dataclass(frozen=True, slots=True)
class PolicyPreset:
    """The names of a policy's four choices. Called, it makes new ones."""

    name: str
    order: str
    admit: str = "predicted-reserve"
    compose: str = "decode-first"
    evict: str = "latest-victim"
    own: PolicyOptions = field(default_factory=PolicyOptions)

    def __call__(self, options: PolicyOptions | None = None) -> Policy:
        """Raises `UnknownPolicy` for a choice that `options` names and that does not exist."""
        options = options or PolicyOptions()
        own = {name: getattr(self.own, name) for name in OWN_OPTIONS if getattr(options, name) is None}
        options = replace(options, **own)
        return Policy(
            self.name,
            _known("order", ORDERS, options.order or self.order),
            _choice("admit", ADMITS, options.admit or self.admit)(options),
            _choice("compose", COMPOSES, options.compose or self.compose)(options),
            _choice("evict", EVICTS, options.evict or self.evict)(options),
            options,
        )


_PRESETS = [
    PolicyPreset("static", "fcfs", admit="static"),
    PolicyPreset("dynamic", "fcfs", admit="dynamic"),
    PolicyPreset("buckets", "buckets", admit="buckets"),
    PolicyPreset("fcfs", "fcfs"),
    PolicyPreset("hrrn", "hrrn"),
    PolicyPreset("sjf", "sjf"),
    PolicyPreset("srpt", "srpt"),
    PolicyPreset("las", "las", evict="attained-victim"),
    PolicyPreset("mlfq", "mlfq", evict="attained-victim"),
    PolicyPreset("priority", "priority"),
    PolicyPreset("edf", "edf"),
    PolicyPreset("drr", "drr", compose="token-fair", evict="fair-victim"),
    PolicyPreset("dlpm", "dlpm", compose="token-fair", evict="fair-victim"),
    PolicyPreset("vtc", "vtc", compose="token-fair", evict="fair-victim"),
    PolicyPreset("hybrid", "hybrid", compose="token-fair", evict="fair-victim", own=HYBRID_OPTIONS),
]

POLICIES: dict[str, Callable[..., Policy]] = {preset.name: preset for preset in _PRESETS}
"""Policies by name; each call (with `PolicyOptions`, or nothing) makes new choices."""

SIMULATED = {"static-padded": "static"}
"""Policies of the simulator alone, which pads their steps, by the one that forms their batches."""

DEFAULT_POLICY = "hybrid"

TABLE_POLICIES: dict[str, Callable[..., Policy]] = {"table": PolicyPreset("table", "sjf", admit="table")}
"""Those that need `batch_or_wait_table`; in the order of the line that tables are solved for."""


LEARNED = "learned"
LEARNED_POLICIES: dict[str, Callable[..., Policy]] = {
    LEARNED: PolicyPreset(LEARNED, "hybrid", compose="token-fair", evict="fair-victim", own=HYBRID_OPTIONS)
}
"""They need `learned_table`, which their gateways look up, and else choose as `hybrid` does."""


def policy_names(options: PolicyOptions | None = None) -> list[str]:
    """Policies that can be made with these options."""
    has_table = options is not None and options.batch_or_wait_table is not None
    has_learned = options is not None and bool(options.learned_table)
    return sorted(
        POLICIES.keys()
        | (TABLE_POLICIES.keys() if has_table else set())
        | (LEARNED_POLICIES.keys() if has_learned else set())
    )


def require_learned_table(name: str, options: PolicyOptions) -> None:
    """Raises `NeedsTable` for a learned policy without its table's name: for gateways; engines need none."""
    if name in LEARNED_POLICIES and not options.learned_table:
        raise NeedsTable(
            f"the policy {name!r} looks up a learned table, and none is set: make one with `fairgate policy"
            " learn` and name its file in the setting policy.learned_table, or in"
            f" `fairgate policy set {name} --option learned_table=FILE`"
        )


def make_order(name: str, counters: ServiceCountersLike) -> Order:
    """A new, empty order. Raises `UnknownPolicy`."""
    if name not in ORDERS:
        raise UnknownPolicy(f"no order {name!r}; there are {', '.join(sorted(ORDERS))}")
    return ORDERS[name](counters)


def make_policy(name: str, options: PolicyOptions | None = None) -> Policy:
    """Raises `UnknownPolicy`, `NeedsTable`, and ValueError for options that do not go together."""
    return _choice("policy", POLICIES | TABLE_POLICIES | LEARNED_POLICIES, name)(options)


def is_idle(option: str, compose: str) -> bool:
    """Whether an option does nothing under a composition."""
    return compose not in COMPOSED_BY.get(option, (compose,))


def refuse_idle_options(name: str, options: PolicyOptions) -> None:
    """Raises `BadOption` for one that does nothing under the policy's composition, and as `make_policy`."""
    compose = make_policy(name, options).compose.name
    for option in options.changed():
        if is_idle(option, compose):
            raise BadOption(
                f"option {option} does nothing here: the composition is {compose}, and only"
                f" {', '.join(COMPOSED_BY[option])} goes by it"
            )


def composition_notice(name: str, options: PolicyOptions) -> str:
    """Says that the composition chosen turns the policy's token-fair one off; empty: it does not."""
    own = make_policy(name, replace(options, compose="")).compose.name
    if own != "token-fair" or options.compose in ("", own):
        return ""
    return (
        f"compose={options.compose} turns the token-fair composition of {name} off: weights decide who runs,"
        " not who gets a step's tokens"
    )


def _choice(kind: str, named: Mapping[str, Callable[..., Choice]], name: str) -> Callable[..., Choice]:
    return named[_known(kind, named, name)]


def _known(kind: str, named: Mapping[str, object], name: str) -> str:
    if name not in named:
        raise UnknownPolicy(_unknown(kind, named, name))
    return name


def _unknown(kind: str, named: Mapping[str, object], name: str) -> str:
    if name in SIMULATED:
        return (
            f"{kind} {name!r} is for `fairgate simulate` alone: no server pads its steps, and without padding"
            f" it is {SIMULATED[name]!r}"
        )
    return f"no {kind} {name!r}; there are {', '.join(sorted(named))}"


def options_of(values: Mapping[str, object]) -> PolicyOptions:
    """Options from texts and numbers, with the table file that they name. Raises `BadOption`, `BadTable`."""
    options = parsed_options(values)
    for decision, named in CHOICES.items():
        choice = getattr(options, decision)
        if choice and choice not in named:
            raise BadOption(_unknown(decision, named, choice))
    return with_table(options)


def with_table(options: PolicyOptions) -> PolicyOptions:
    if not options.table or options.batch_or_wait_table is not None:
        return options
    path = options.table
    try:
        return replace(options, batch_or_wait_table=BatchOrWaitTable.load(Path(path)))
    except OSError as error:
        raise BadTable(f"{path} cannot be read: {error.strerror}; see `fairgate policy solve`") from None
