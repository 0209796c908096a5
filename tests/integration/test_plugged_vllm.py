"""An upstream and the plug-in of a vLLM: leases, ends, outcomes and policies over the channel.

Over real sockets, against a stand-in of vLLM with the plug-in's own gateway side
(`tests/support/plugged_vllm.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.messages import EngineKnobs, Submit, TenantShare
from engine.vllm_plugin.channel.unix_socket import serve_unix_socket
from engine.vllm_plugin.signature import encode_refusal, verify
from gateway.upstream.base import CountedOutcome, UpstreamFailed, UpstreamLost, UpstreamUnavailable, Wording
from gateway.upstream.openai.config import OpenAIServer
from gateway.upstream.openai.request import PriorityStyle
from gateway.upstream.openai.upstream import OpenAIUpstream
from tests.integration.test_openai_upstream import answer_of, text_of
from tests.support.engine_process import until
from tests.support.faulty_servers import MODEL
from tests.support.plugged_vllm import KEY, PluggedVllm

STREAMED = Wording(messages=[{"role": "user", "content": "Hello"}])
WHOLE = Wording(messages=STREAMED.messages, is_streamed=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle channel is heard as often as a busy one."""
    monkeypatch.setattr("gateway.upstream.vllm_plugin.link.IDLE_EVERY_S", 0.1)


def submit(name: str = "s", *, lease: int = 16, most: int = 40, **fields: Any) -> Submit:
    return Submit(name, f"r-{name}", "ten", [1, 2, 3], most, lease, **fields)


@asynccontextmanager
async def upstream_of(vllm: PluggedVllm, **fields: Any) -> AsyncIterator[OpenAIUpstream]:
    """An upstream with the plug-in's key."""
    settings: dict[str, Any] = {"key": KEY, "gateway_id": "gw", "socket": "", "between_s": 0.4} | fields
    upstream = OpenAIUpstream(
        OpenAIServer(
            "vllm-a",
            vllm.peer.url,
            MODEL,
            priority=PriorityStyle.FAIRGATE,
            plugin_key=settings["key"].encode(),
            plugin_socket=settings["socket"],
            capabilities=(),
            first_byte_s=0.4,
            between_s=settings["between_s"],
        ),
        gateway_id=settings["gateway_id"],
    )
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.close()


@asynccontextmanager
async def plugged(between_s: float = 0.4, **fields: Any) -> AsyncIterator[tuple[PluggedVllm, OpenAIUpstream]]:
    vllm = PluggedVllm(**fields)
    async with vllm.peer, upstream_of(vllm, between_s=between_s) as upstream:
        yield vllm, upstream


async def test_a_sequence_rests_at_its_lease_goes_on_when_topped_up_and_ends_by_itself() -> None:
    async with plugged() as (vllm, upstream):
        deltas = upstream.run(submit(weight=3.0, counter=5, had=4, heard=3), STREAMED)
        await text_of(deltas, 16)
        # Longer than between_s: it rests for a reason.
        await asyncio.sleep(0.6)
        (sequence,) = vllm.live
        assert (sequence.emitted_tokens, sequence.lease_tokens) == (16, 16)
        (body,) = vllm.bodies
        assert body["max_tokens"] == 40, "the true most: the plug-in stops it"
        claims = verify(body["vllm_xargs"]["fairgate"], KEY.encode(), sequence_time(body))
        assert (claims.weight, claims.counter, claims.had, claims.heard) == (3.0, 5, 4, 3)
        assert "priority" not in body
        for lease in (30, 40, 40):
            upstream.top_up("s", lease, None)
        text, outcome = await answer_of(deltas)
        assert text == "a" * 24
        assert (outcome.finish, outcome.emitted_tokens, outcome.basis) == ("length", 40, "upstream")


def sequence_time(body: Mapping[str, Any]) -> float:
    """When a request was signed, by its own word."""
    import base64
    import json

    text = body["vllm_xargs"]["fairgate"].partition(".")[0]
    issued_at_s: float = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))["issued_at_s"]
    return issued_at_s


@pytest.mark.parametrize("wording", [STREAMED, WHOLE], ids=["streamed", "whole"])
async def test_a_spent_budget_ends_what_rests_with_the_servers_own_count(wording: Wording) -> None:
    async with plugged() as (vllm, upstream):
        deltas = upstream.run(submit(), wording)
        await text_of(deltas, 16)
        upstream.cancel("s", "budget")
        upstream.cancel("s", "budget")
        _, outcome = await answer_of(deltas)
        assert (outcome.finish, outcome.emitted_tokens, outcome.basis) == ("budget", 16, "upstream")
        assert [each.emitted_tokens for each in vllm.all] == [16]
        found = await upstream.collect()
        assert [(each.finish, each.emitted_tokens) for each in found.outcomes] == [("budget", 16)]
        upstream.acknowledge(["s"])
        assert (await upstream.collect()).outcomes == []


async def test_what_the_stream_of_a_resting_sequence_lacks_counts_when_its_reader_has_read() -> None:
    async with plugged() as (vllm, upstream):
        vllm.held_back = 4
        deltas = upstream.run(submit(), STREAMED)
        first = await anext(deltas)  # the rest comes after this
        await until(lambda: upstream.describe()["plugin"]["parked"] == 1)
        async with asyncio.timeout(10):
            while (await upstream.collect()).running[0].emitted_tokens < 12:
                pass
        await upstream.probe()
        assert (await upstream.collect()).running[0].emitted_tokens == 12, "it was not read"
        await text_of(deltas, 12 - len(first.text))
        lacked = await asyncio.wait_for(anext(deltas), 10)
        assert (lacked.text, len(lacked.token_ids)) == ("", 4)
        upstream.cancel("s", "budget")
        text, outcome = await answer_of(deltas)
        assert (text, outcome.emitted_tokens) == ("aaaa", 16)


async def test_a_cancelled_sequence_is_counted_to_the_last_token_that_the_server_emitted() -> None:
    async with plugged() as (vllm, upstream):
        deltas = upstream.run(submit(lease=4000, most=4000), STREAMED)
        await anext(deltas)
        upstream.cancel("s", "cancelled")
        _, outcome = await answer_of(deltas)
        (sequence,) = vllm.all
        assert not vllm.live
        assert (outcome.finish, outcome.emitted_tokens) == ("cancelled", sequence.emitted_tokens)


async def test_a_server_that_does_not_end_a_sequence_in_time_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.upstream.openai.sequence.STOP_S", 0.1)
    async with plugged() as (vllm, upstream):
        deltas = upstream.run(submit(), STREAMED)
        await text_of(deltas, 16)
        monkeypatch.setattr(vllm.scheduler, "end", lambda sequence_id, cause: True)
        upstream.cancel("s", "budget")
        _, outcome = await answer_of(deltas)
        assert (outcome.finish, outcome.emitted_tokens, outcome.basis) == ("budget", 16, "gateway")
        await until(lambda: not vllm.live)


async def test_an_answer_that_is_covered_comes_whole() -> None:
    async with plugged() as (vllm, upstream):
        text, outcome = await answer_of(upstream.run(submit(lease=40), WHOLE))
        assert "stream" not in vllm.bodies[0]
        assert (text, outcome.finish, outcome.emitted_tokens) == ("a" * 40, "length", 40)


async def test_many_sequences_wait_for_their_turn_without_being_given_up() -> None:
    async with plugged(slots=1) as (_, upstream):
        names = [f"s{number}" for number in range(12)]
        answers = await asyncio.gather(
            *(answer_of(upstream.run(submit(name, lease=30, most=30), STREAMED)) for name in names)
        )
        assert {outcome.emitted_tokens for _, outcome in answers} == {30}


async def test_service_is_told_with_its_serials() -> None:
    told: dict[str, list[TenantShare]] = {}
    async with plugged() as (_, upstream):

        def listen(service: Mapping[str, TenantShare]) -> None:
            for tenant_id, share in service.items():
                told.setdefault(tenant_id, []).append(share)

        upstream.listen(listen)
        await answer_of(upstream.run(submit(lease=40), STREAMED))
        await until(lambda: sum(each.emitted_tokens for each in told.get("ten", ())) == 40)
        ready = upstream.ready
        assert ready is not None
        assert (ready.policy, bool(ready.life)) == ("hybrid", True)
        assert told["ten"][-1].serials[1] > 0


# ---------------------------------------------------------------- servers that cannot be used


async def test_a_server_without_the_plugin_is_not_used_and_says_what_to_do() -> None:
    vllm = PluggedVllm()
    vllm.has_plugin = False
    async with vllm.peer, upstream_of(vllm) as upstream:
        refusal = upstream.describe()["refusal"]
        assert "it has no Fairgate plug-in: start it with --scheduler-cls" in refusal
        assert 'set priority = "vllm"' in refusal
        with pytest.raises(UpstreamUnavailable, match="no Fairgate plug-in"):
            upstream.run(submit(), STREAMED)
        assert vllm.bodies == []
        vllm.has_plugin = True
        await until(lambda: upstream.is_up)
        assert upstream.describe()["plugin"]["version"] == "0.0.test"


async def test_another_key_is_refused_on_both_sides() -> None:
    vllm = PluggedVllm(key="another key, and it is long enough")
    async with vllm.peer, upstream_of(vllm) as upstream:
        assert "its plug-in has another key" in upstream.describe()["refusal"]
        assert not upstream.is_up
        assert KEY not in str(upstream.describe())


async def test_a_plugin_of_another_version_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = PluggedVllm()
    refusal = encode_refusal("protocol_version", "the plug-in speaks protocol 7, the gateway 1")
    monkeypatch.setattr(vllm.channel, "answer", lambda frame, is_core_thread: refusal)
    async with vllm.peer, upstream_of(vllm) as upstream:
        assert "install the fairgate-vllm of the gateway's version" in upstream.describe()["refusal"]
        assert not upstream.is_up


async def test_a_server_that_lost_contact_ends_what_rests_and_the_answer_fails() -> None:
    async with plugged(between_s=10.0, timeout_s=0.3) as (vllm, upstream):
        deltas = upstream.run(submit(), STREAMED)
        await text_of(deltas, 16)
        vllm.has_plugin = False  # the channel is gone, the stream is not
        with pytest.raises(UpstreamFailed, match="lost contact"):
            await answer_of(deltas)
        assert [each.emitted_tokens for each in vllm.all] == [16]
        assert not upstream.is_up


async def test_one_lost_connection_is_no_lost_plugin() -> None:
    async with plugged() as (vllm, upstream):
        changes: list[bool] = []
        upstream.watch(lambda: changes.append(upstream.is_up))
        vllm.drops = 1
        assert (await upstream.collect()).outcomes == []
        vllm.drops = 2
        with pytest.raises(UpstreamLost, match="does not answer"):
            await upstream.collect()
        await until(lambda: upstream.is_up)
        assert changes == [False, True]


# ---------------------------------------------------------------- outcomes that nothing reads


async def test_another_life_of_a_gateway_gets_the_outcomes_of_the_one_before() -> None:
    vllm = PluggedVllm()
    async with vllm.peer, upstream_of(vllm) as before:
        deltas = before.run(submit(), STREAMED)
        await text_of(deltas, 16)
        told: list[int] = []
        async with upstream_of(vllm) as after:
            after.watch(lambda: told.append(1))
            await until(lambda: not vllm.live)
            await until(lambda: told)
            found = await after.collect()
            assert [(each.request_id, each.emitted_tokens) for each in found.outcomes] == [("r-s", 16)]
            await until(lambda: not before.is_up)
            assert "another process uses this gateway's id" in before.describe()["refusal"]
            after.acknowledge(["s"])
            assert (await after.collect()).outcomes == []


async def test_a_gateway_adopts_what_a_silent_one_left() -> None:
    vllm = PluggedVllm(timeout_s=0.3)
    async with vllm.peer, upstream_of(vllm, gateway_id="heir") as heir:
        async with upstream_of(vllm, gateway_id="dead") as dead:
            deltas = dead.run(submit(), STREAMED)
            await text_of(deltas, 16)
            found = await heir.collect(adopt=True)
            assert (found.outcomes, set(found.gateways)) == ([], {"dead", "heir"})
        await asyncio.sleep(0.4)
        found = await heir.collect(adopt=True)
        assert [(each.request_id, each.emitted_tokens) for each in found.outcomes] == [("r-s", 16)]
        assert found.gateways == ["heir"]


# ---------------------------------------------------------------- policies


async def test_a_policy_reaches_the_plugin_and_comes_back_after_a_restart() -> None:
    vllm = PluggedVllm()
    async with vllm.peer, upstream_of(vllm) as upstream:
        await upstream.set_policy("vtc", {"slots": 4})
        await until(lambda: vllm.scheduler.policy == "vtc")
        explained = await upstream.explain()
        assert (explained.policy, explained.options, explained.choices["order"]) == (
            "vtc",
            {"slots": 4},
            "vtc",
        )
        with pytest.raises(ValueError, match="edf does not go with this server"):
            await upstream.set_policy("edf", {})
        await upstream.set_policy("vtc", {"slots": 4})
        vllm.restart()
        assert vllm.scheduler.policy == "hybrid"
        await until(lambda: vllm.scheduler.policy == "vtc")


async def test_knobs_turn_the_options_of_the_policy_that_was_asked_for() -> None:
    vllm = PluggedVllm(slots=8)
    async with vllm.peer, upstream_of(vllm) as upstream:
        await upstream.set_policy("learned", {"cap_tokens": 64})

        upstream.set_knobs(EngineKnobs(slot_share=0.5, reserve_permille=250, token_share=0.5))
        turned = {"cap_tokens": 64, "slots": 4, "reserve_permille": 250}
        await until(lambda: vllm.scheduler.options.changed() == turned)
        vllm.restart()
        await until(lambda: vllm.scheduler.options.changed() == turned)
        upstream.set_knobs(EngineKnobs())
        await until(lambda: vllm.scheduler.options.changed() == {"cap_tokens": 64})


async def test_a_policy_for_a_server_that_is_away_is_set_when_it_comes() -> None:
    vllm = PluggedVllm()
    vllm.has_plugin = False
    async with vllm.peer, upstream_of(vllm) as upstream:
        with pytest.raises(UpstreamLost):
            await upstream.set_policy("vtc", {})
        vllm.has_plugin = True
        await until(lambda: vllm.scheduler.policy == "vtc")


# ---------------------------------------------------------------- the socket


async def test_the_channel_works_over_a_unix_socket(tmp_path: Any) -> None:
    path = str(tmp_path / "plugin.sock")
    vllm = PluggedVllm()
    vllm.has_plugin = False  # nothing over HTTP
    async with vllm.peer, upstream_of(vllm, socket=path) as upstream:
        assert f"there is no socket {path}" in upstream.describe()["refusal"]
        listener = serve_unix_socket(path, lambda frame: vllm.channel.answer(frame, is_core_thread=False))
        try:
            await until(lambda: upstream.is_up)
            vllm.begin()
            deltas = upstream.run(submit(), STREAMED)
            await text_of(deltas, 16)
            upstream.top_up("s", 40, None)
            _, outcome = await answer_of(deltas)
            assert isinstance(outcome, CountedOutcome)
            assert (outcome.finish, outcome.emitted_tokens) == ("length", 40)
        finally:
            listener.close()
