"""Translations between the gateway's messages and the engine's: claims, outcomes, news of sequences. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from engine.messages import SequenceOutcome, Submit
from engine.vllm_plugin.channel.gateways import ChannelGateway, LiveSequence
from engine.vllm_plugin.protocol import MAX_REPORTED_SEQUENCES, ContractClaims, SequenceNews
from engine.vllm_plugin.seam import Ended


def submit_of(claims: ContractClaims, max_tokens: int, lease_tokens: int) -> Submit:
    return Submit(
        claims.sequence_id,
        claims.request_id,
        claims.tenant_id,
        [],
        max_tokens,
        lease_tokens,
        tier=claims.tier,
        weight=claims.weight,
        counter=claims.counter,
        had=claims.had,
        heard=claims.heard,
        is_owed=claims.is_owed,
        predicted_output_tokens=claims.predicted_output_tokens,
        predicted_high_tokens=claims.predicted_high_tokens,
        deadline_in_s=claims.deadline_in_s,
        own_deadline_in_s=claims.own_deadline_in_s,
        ttft_target_s=claims.ttft_target_s,
        tpot_target_s=claims.tpot_target_s,
    )


def news_of_end(sequence: LiveSequence, ended: Ended, now_s: float) -> SequenceNews:
    outcome = SequenceOutcome(
        ended.sequence_id,
        sequence.request_id,
        sequence.tenant_id,
        ended.finish,
        ended.prompt_tokens,
        ended.cached_tokens,
        _computed(sequence, ended),
        ended.emitted_tokens,
        index=sequence.index,
        tier=sequence.tier,
        preemptions=ended.preemptions,
        recomputed_tokens=ended.recomputed_tokens,
        finished_s=now_s - sequence.arrived_s,
    )
    return SequenceNews(
        "ended", ended.emitted_tokens, sequence.lease_tokens, sequence.request_id, sequence.tenant_id,
        sequence.tier, outcome,
    )  # fmt: skip


def _computed(sequence: LiveSequence, ended: Ended) -> int:
    """Prompt tokens that were computed: all that were not cached, or of an unfinished prompt as last seen."""
    most = max(0, ended.prompt_tokens - ended.cached_tokens)
    return most if ended.emitted_tokens else min(most, sequence.computed_tokens)


def sequence_news(gateway: ChannelGateway, heard: int, position: int) -> dict[str, SequenceNews]:
    """News for the report at `position`, to a gateway that knows the one at `heard`."""
    news_of: dict[str, SequenceNews] = {}
    for sequence_id, news in gateway.outcomes.items():
        if len(news_of) >= MAX_REPORTED_SEQUENCES:
            return news_of
        news_of[sequence_id] = news
    live: Iterable[LiveSequence] = gateway.live.values()
    if len(news_of) + len(gateway.live) > MAX_REPORTED_SEQUENCES:
        # What is cut off is told first by the next report.
        live = sorted(live, key=lambda sequence: sequence.changed)
    for sequence in live:
        if len(news_of) >= MAX_REPORTED_SEQUENCES:
            break
        if _is_changed(sequence, heard, position):
            news_of[sequence.sequence_id] = SequenceNews(
                sequence.state,
                sequence.emitted_tokens,
                sequence.lease_tokens,
                sequence.request_id,
                sequence.tenant_id,
                sequence.tier,
            )
    return news_of


def _is_changed(sequence: LiveSequence, heard: int, position: int) -> bool:
    """Whether it belongs in the report at `position`, which is noted."""
    state = (sequence.state, sequence.emitted_tokens, sequence.lease_tokens)
    if state != sequence.told:
        sequence.told, sequence.changed = state, position
    return sequence.changed > heard
