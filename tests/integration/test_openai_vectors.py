"""Embeddings from another server that fails, is full, or cuts its answer: moved or refused, charged once."""

from __future__ import annotations

import json

import pytest

from gateway.upstream.base import NotBegun, RequestTask, SequenceRefused, UpstreamFailed, Wording
from gateway.upstream.capabilities import Capability
from tests.integration.test_openai_upstream import answer_of, closes_at_once, sequence, upstream_of
from tests.support.faulty_servers import Handler, Peer, PeerRequest

ASKED = Wording(task=RequestTask.EMBED, fields={"input": ["a"]}, is_uncountable=True)
ANSWER = {"data": [{"index": 0, "embedding": [1.5]}], "usage": {"prompt_tokens": 2, "total_tokens": 2}}
VECTORS = (Capability.EMBEDDINGS,)


async def well(request: PeerRequest) -> None:
    await request.json(ANSWER)


async def full(request: PeerRequest) -> None:
    await request.json({}, status=429)


async def broken(request: PeerRequest) -> None:
    await request.json({}, status=500)


async def cut(request: PeerRequest) -> None:
    payload = json.dumps(ANSWER).encode()
    await request.send(
        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n", payload
    )
    request.writer.close()


async def refuses(request: PeerRequest) -> None:
    await request.json(
        {"error": {"message": "they are fixed, says s3cret", "param": "dimensions"}}, status=400
    )


@pytest.mark.parametrize("fails", [closes_at_once, full, broken])
async def test_what_has_not_begun_goes_to_another_replica(fails: Handler) -> None:
    async with (
        Peer(fails) as first,
        Peer(well) as second,
        upstream_of(first, second, capabilities=VECTORS) as upstream,
    ):
        text, outcome = await answer_of(upstream.run(sequence(max_tokens=0, lease_tokens=0), ASKED))
    assert json.loads(text) == [{"object": "embedding", "index": 0, "embedding": [1.5]}]
    assert (outcome.replica_id, outcome.finish, outcome.emitted_tokens) == ("peer-1", "stop", 0)
    assert (outcome.computed_tokens, outcome.basis) == (2, "upstream")


async def test_what_breaks_off_is_not_repeated() -> None:
    async with Peer(cut) as first, Peer(well) as second:
        async with upstream_of(first, second, capabilities=VECTORS) as upstream:
            with pytest.raises(UpstreamFailed) as failed:
                await answer_of(upstream.run(sequence(max_tokens=0, lease_tokens=0), ASKED))
            assert not isinstance(failed.value, NotBegun)
        assert second.requests == []


async def test_a_refusal_names_the_field_and_the_reason() -> None:
    async with Peer(refuses) as peer, upstream_of(peer, capabilities=VECTORS, api_key="s3cret") as upstream:
        with pytest.raises(SequenceRefused) as refused:
            await answer_of(upstream.run(sequence(max_tokens=0, lease_tokens=0), ASKED))
        assert refused.value.message.endswith("the field 'dimensions': they are fixed, says (its key)")
        assert refused.value.param == "dimensions"


async def test_a_cancelled_one_is_charged_its_prompt() -> None:
    async def stalls(request: PeerRequest) -> None:
        upstream.cancel("s0", "cancelled")
        await request.until_gone()

    async with Peer(stalls) as peer, upstream_of(peer, capabilities=VECTORS) as upstream:
        text, outcome = await answer_of(upstream.run(sequence(max_tokens=0, lease_tokens=0), ASKED))
    assert (text, outcome.finish, outcome.computed_tokens) == ("", "cancelled", 4)
    assert (outcome.emitted_tokens, outcome.uncertain_tokens) == (0, 0)


async def test_a_server_is_found_to_compute_embeddings_and_no_text() -> None:
    async def only_vectors(request: PeerRequest) -> None:
        if request.path == "/v1/embeddings":
            await request.json(ANSWER)
        else:
            await request.json({"detail": "Not Found"}, status=404)

    async with Peer(only_vectors) as peer, upstream_of(peer, capabilities="auto") as upstream:
        await upstream.monitor.trials.try_all()
        assert upstream.capabilities.words == {Capability.EMBEDDINGS}
        assert upstream.capabilities.lacks({Capability.TEXT}) == Capability.TEXT
