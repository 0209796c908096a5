"""Benchmark of token shares by weight when more sequences decode than a step has slots."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.evict.victims import FairVictim
from engine.scheduling.policy import Policy
from ops.bench.policies.published_settings import A10G_LLAMA_2_7B
from ops.reporting import Check, Report
from ops.simulate.engine_run import EngineRun, Moment, run_load
from ops.simulate.traffic.arrivals import fixed, merged, stream

WINDOW_STEPS = 64
SETTLED_STEPS = 100
"""After the last prompt: what one tenant's prompts had while the other had none is paid back by then."""
SLOTS = 25
CAP_TOKENS = 32
INPUT_TOKENS, OUTPUT_TOKENS = 48, 300
"""A prompt is longer than the cap, so that the cap acts."""
MACHINE = replace(A10G_LLAMA_2_7B, kv_tokens=64_000, max_sequences=64, max_batched_tokens=256)


@dataclass(frozen=True, slots=True)
class ComposeTenant:
    """One tenant: its number of sequences and its weight."""

    tenant: str
    sequences: int
    weight: float


PARTIES: tuple[tuple[ComposeTenant, ComposeTenant], ...] = (
    (ComposeTenant("one", 1, 1.0), ComposeTenant("many", 50, 1.0)),
    (ComposeTenant("one", 1, 1.0), ComposeTenant("many", 50, 49.0)),
    (ComposeTenant("few", 20, 1.0), ComposeTenant("many", 31, 1.0)),
    (ComposeTenant("few", 20, 1.0), ComposeTenant("many", 31, 4.0)),
)

COLUMNS = (
    ("sequences", "sequences"),
    ("weights", "weights"),
    ("due", "tokens due in 64 steps"),
    ("least", "least"),
    ("most", "most"),
    ("off", "furthest off"),
    ("windows", "windows"),
    ("floor", "floor"),
    ("credit", "credit"),
    ("cap", "cap"),
)


def due_a_step(parties: Sequence[ComposeTenant], slots: int) -> dict[str, float]:
    """Tokens a step by weight, at most one for each sequence; the others share what that leaves."""
    due: dict[str, float] = {}
    left, open_parties = float(slots), list(parties)
    while open_parties:
        weight = sum(party.weight for party in open_parties)
        full = [party for party in open_parties if party.sequences <= left * party.weight / weight]
        if not full:
            return due | {party.tenant: left * party.weight / weight for party in open_parties}
        for party in full:
            due[party.tenant] = float(party.sequences)
            left -= party.sequences
            open_parties.remove(party)
    return due


def composition(policies: Collection[str]) -> Report:
    """Two tenants, 51 sequences in 25 slots."""
    report = Report(f"token-fair composition: {SLOTS} slots a step, twice as many sequences", COLUMNS)
    report.notes.append(
        "due: by weight, at most one token a step for each sequence, the rest to the other; every stretch of"
        f" {WINDOW_STEPS} steps in which all sequences decode, from {SETTLED_STEPS} after the last prompt on;"
        " floor, credit and cap: how often each acted"
    )
    for parties in PARTIES:
        run = _run(parties)
        due = due_a_step(parties, SLOTS)
        tenant = parties[0].tenant
        windows = tokens_in_windows(run.moments, parties)
        off = max(abs(tokens - WINDOW_STEPS * due[tenant]) for tokens in windows)
        assert run.policy is not None
        compose = run.policy.compose
        assert isinstance(compose, TokenFair)
        acted: Mapping[str, int] = {
            "floor": compose.floor_tokens,
            "credit": compose.credit_tokens,
            "cap": compose.capped_chunks,
        }
        names = " and ".join(str(party.sequences) for party in parties)
        weights = " : ".join(f"{party.weight:g}" for party in parties)
        report.rows.append(
            {
                "sequences": names,
                "weights": weights,
                "due": f"{tenant}: {WINDOW_STEPS * due[tenant]:.1f}",
                "least": min(windows),
                "most": max(windows),
                "off": off,
                "windows": len(windows),
                **acted,
            }
        )
        what = f"{names} sequences, weights {weights}"
        report.checks.append(Check(f"{what}: tokens off in {WINDOW_STEPS} steps", off, SLOTS))
        report.checks.extend(
            Check(f"{what}: {name} acted", count, 1, at_most=False) for name, count in acted.items()
        )
    return report


def tokens_in_windows(moments: Sequence[Moment], parties: Sequence[ComposeTenant]) -> list[int]:
    """The first party's output tokens in every stretch of `WINDOW_STEPS` steps in which all sequences of all
    parties decoded."""
    all_sequences = {party.tenant: party.sequences for party in parties}
    found = []
    sums = [0]
    last_prompt = max(
        (step for step, moment in enumerate(moments) if any(moment.computed.values())), default=0
    )
    for moment in moments[last_prompt + SETTLED_STEPS :]:
        if moment.running != all_sequences:
            sums = [0]
            continue
        sums.append(sums[-1] + moment.emitted.get(parties[0].tenant, 0))
        if len(sums) > WINDOW_STEPS:
            found.append(sums[-1] - sums[-1 - WINDOW_STEPS])
    return found


def _run(parties: Sequence[ComposeTenant]) -> EngineRun:
    rng = random.Random(0)
    arrivals = merged(
        stream(
            [0.0] * party.sequences,
            party.tenant,
            fixed(INPUT_TOKENS, OUTPUT_TOKENS),
            rng,
            weight=party.weight,
        )
        for party in parties
    )
    return run_load(
        lambda: Policy(
            name="token-fair",
            order="vtc",
            admit=PredictedReserve(),
            compose=TokenFair(slots=SLOTS, cap_tokens=CAP_TOKENS),
            evict=FairVictim(),
        ),
        arrivals,
        MACHINE,
        watch=True,
        watch_running=True,
    )
