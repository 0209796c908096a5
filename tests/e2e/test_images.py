"""Images through a running gateway, to a server that takes them: a stand-in that counts them by rule."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.test_upstreams import settled
from tests.support.faulty_servers import Peer, PeerRequest, in_thread, piece, usage
from tests.support.server_process import Server, server_process, until

SEES, READS = "sees", "reads"
IMAGE_TOKENS, TEXT_TOKENS = 300, 7
"""What is held for an image, and what the stand-in says that a text is."""
PIXEL = "data:image/png;base64,iVBORw0KGgo="
MIB = 2**20
PRICES = f"{SEES}=100/300/50,{READS}=100/300/50,counted=100/300/50"


def image(url: str = PIXEL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | fields}


def says(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def answer(request: PeerRequest) -> None:
    """Counts 100 tokens an image; one that is asked to lie counts a million, one that is to keep silent
    nothing."""
    content = request.body["messages"][-1]["content"]
    texts = [part["text"] for part in content if part["type"] == "text"] if isinstance(content, list) else []
    images = 0 if isinstance(content, str) else sum(part["type"] == "image_url" for part in content)
    said = 10**6 if "lie" in texts else TEXT_TOKENS + 100 * images
    counted = [] if "silence" in texts else [usage(said, 1)]
    if request.body.get("stream"):
        await request.head()
        await request.events(piece("seen", "stop"), *counted, "[DONE]")
        await request.last()
        return
    choice = {"index": 0, "message": {"role": "assistant", "content": "seen"}, "finish_reason": "stop"}
    await request.json({"choices": [choice]} | ({"usage": counted[0]["usage"]} if counted else {}))


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with in_thread(Peer(answer, models=(SEES, READS))) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, chat_model: Path, peer: Peer) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("images")
    lines: list[str] = []
    for pool, model, words in (
        (SEES, SEES, ["images", "tools"]),
        ("counted", SEES, ["images", "tools"]),
        (READS, READS, []),
    ):
        lines += ["[[upstreams]]", f'name = "{pool}-a"', f'pool = "{pool}"', f'model = "{model}"']
        lines += [f'url = "{peer.url}/v1"', f"capabilities = {json.dumps(words)}"]
        lines += [f"image_tokens = {IMAGE_TOKENS}", f"max_body_bytes = {4 * MIB}"]
        if pool == "counted":
            lines.append(f'tokenizer_dir = "{chat_model}"')
    lines += ["[aliases]", f'either = {{ chain = ["{READS}", "{SEES}"] }}']
    toml = home / "gateway.toml"
    toml.write_text("\n".join(lines) + "\n")
    arguments = ["--engine-serve", "no", "--config", str(toml), "--prices", PRICES]
    arguments += ["--gateway-large-bodies", "8MiB"]
    with server_process(home / "data", chat_model, *arguments) as running:
        yield running


def ask(server: Server, key: str, *parts: Any, model: str = SEES, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4} | fields
    with server.http(key) as client:
        return client.post("/v1/chat/completions", json=body)


def test_the_openai_sdk_sends_an_image_and_pays_what_the_server_counts(gateway: Server, peer: Peer) -> None:
    key = gateway.tenant("sees-images")
    content: Any = [says("what is it?"), image(detail="low"), image("https://example.org/a.png")]
    with OpenAI(api_key=key, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        found = client.chat.completions.create(
            model=SEES, messages=[{"role": "user", "content": content}], max_tokens=4
        )
    assert found.choices[0].message.content == "seen"
    assert peer.requests[-1].body["messages"][0]["content"] == content
    assert found.usage is not None
    assert found.usage.prompt_tokens == TEXT_TOKENS + 200
    (row,) = settled(gateway, "sees-images")
    assert (row["input_tokens"], row["output_tokens"]) == (TEXT_TOKENS + 200, 1)
    assert row["cost_nanousd"] == 100 * (TEXT_TOKENS + 200) + 300


@pytest.mark.parametrize("model", [SEES, "counted"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_count_above_what_is_held_is_not_charged(gateway: Server, model: str, is_streamed: bool) -> None:
    tenant = f"lied-to-{model}-{is_streamed}"
    key = gateway.tenant(tenant)
    assert ask(gateway, key, says("lie"), image(), model=model, stream=is_streamed).status_code == 200
    (row,) = settled(gateway, tenant)
    held = json.loads(row["detail"])["held"]
    assert row["input_tokens"] == held[0]
    assert IMAGE_TOKENS < held[0] < IMAGE_TOKENS + 100


def test_without_a_count_what_is_held_is_charged_and_the_account_says_so(gateway: Server) -> None:
    account = ask(gateway, gateway.tenant("silent-images"), says("silence"), image()).json()["fairgate"]
    assert account["basis"] == "estimate"
    assert account["actual"]["input_tokens"] > IMAGE_TOKENS


def test_a_text_of_a_model_with_a_tokenizer_is_still_charged_as_counted_here(gateway: Server) -> None:
    """The stand-in says 7 for any text."""
    key = gateway.tenant("counts-text")
    account = ask(gateway, key, says("one two three"), model="counted").json()["fairgate"]
    assert account["actual"]["input_tokens"] != TEXT_TOKENS
    seen = ask(gateway, key, says("one two three"), image(), model="counted").json()["fairgate"]
    assert seen["actual"]["input_tokens"] == TEXT_TOKENS + 100


def test_tools_are_held_with_a_margin_and_paid_as_the_server_counts_them(gateway: Server) -> None:
    """As its server's template writes them; how, is not known here."""
    tool = {"type": "function", "function": {"name": "add", "description": "Adds. " * 40, "parameters": {}}}
    for model in (SEES, "counted"):
        key = gateway.tenant(f"tools-{model}")
        plain = ask(gateway, key, says("add"), model=model).json()["fairgate"]
        account = ask(gateway, key, says("add"), model=model, tools=[tool]).json()["fairgate"]
        held = account["tokens"]["held"] - plain["tokens"]["held"]
        assert held > 512 + 40, "more than a template says of tools, and what this one says of itself"
        assert account["actual"]["input_tokens"] == TEXT_TOKENS
        assert account["basis"] == "upstream"


def test_thoughts_and_texts_in_parts_reach_the_server_as_they_came(gateway: Server, peer: Peer) -> None:
    messages = [
        {"role": "user", "content": [says("add"), says("one and two")]},
        {"role": "assistant", "content": "three", "reasoning_content": "one, and two more"},
        {"role": "user", "content": "again"},
    ]
    key = gateway.tenant("thinks-back")
    body = {"model": "counted", "messages": messages, "max_tokens": 1}
    with gateway.http(key) as client:
        account = client.post("/v1/chat/completions", json=body).json()["fairgate"]
    assert peer.requests[-1].body["messages"] == messages
    assert account["actual"]["input_tokens"] == TEXT_TOKENS, "the server's count: only it knows its template"


def test_a_body_with_images_may_be_larger_and_one_of_text_may_not(gateway: Server, peer: Peer) -> None:
    key = gateway.tenant("large-images")
    large = "data:image/png;base64," + "A" * (3 * MIB)
    assert ask(gateway, key, says("look"), image(large)).status_code == 200
    assert peer.requests[-1].body["messages"][0]["content"][1]["image_url"]["url"] == large
    for parts, model in (
        ([image(large)], READS),  # it takes none
        ([says("a" * 2 * MIB)], SEES),
        ([says("a" * 2 * MIB), image()], SEES),
        ([image(large), image(large)], SEES),
    ):
        refused = ask(gateway, key, *parts, model=model)
        assert refused.status_code == 413, refused.text
        assert refused.json()["error"]["code"] == "request_too_large"


def test_a_large_body_of_a_key_without_a_model_for_it_is_not_read(gateway: Server) -> None:
    gateway.tenant("no-images")
    key = gateway.key("no-images", models=[READS])
    refused = ask(gateway, key, image("data:image/png;base64," + "A" * (2 * MIB)), model=READS)
    assert refused.status_code == 413
    assert f"{MIB} bytes" in refused.json()["error"]["message"]


def test_a_model_without_images_names_the_server(gateway: Server, peer: Peer) -> None:
    before = len(peer.requests)
    refused = ask(gateway, gateway.tenant("reads-only"), says("look"), image(), model=READS)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content[1]"
    assert f"{READS}-a" in refused.json()["error"]["message"]
    assert len(peer.requests) == before


def test_a_chain_goes_on_to_the_model_that_sees(gateway: Server) -> None:
    found = ask(gateway, gateway.tenant("chained-images"), says("look"), image(), model="either").json()
    assert found["model"] == SEES
    large = image("data:image/png;base64," + "A" * (2 * MIB))
    assert (
        ask(gateway, gateway.key("chained-images"), says("look"), large, model="either").json()["model"]
        == SEES
    )


def test_a_quote_holds_what_the_request_will_hold(gateway: Server) -> None:
    key = gateway.tenant("quotes-images")
    messages = [{"role": "user", "content": [says("look"), image()]}]
    with gateway.http(key) as client:
        quote = client.post("/v1/quotes", json={"model": SEES, "messages": messages, "max_tokens": 4}).json()
        offer = quote["quotes"][0]
        headers = {"X-Fairgate-Quote": offer["token"]}
        body = {"model": SEES, "messages": messages, "max_tokens": 4}
        found = client.post("/v1/chat/completions", json=body, headers=headers)
    assert found.status_code == 200, found.text
    assert quote["input_tokens"] > IMAGE_TOKENS
    assert json.loads(settled(gateway, "quotes-images")[0]["detail"])["held"][0] == quote["input_tokens"]


# ------------------------------------------------------------ attacks


@pytest.mark.attack
def test_no_address_is_fetched_by_the_gateway(gateway: Server, peer: Peer) -> None:
    key = gateway.tenant("fetches")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://image.example.org:{listener.getsockname()[1]}/image.png"
        assert ask(gateway, key, says("look"), image(url)).status_code == 200
        assert peer.requests[-1].body["messages"][0]["content"][1]["image_url"]["url"] == url
        with gateway.http(key) as client:
            body = {"model": SEES, "messages": [{"role": "user", "content": [image(url)]}]}
            assert client.post("/v1/quotes", json=body).status_code == 200
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.attack
@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "gopher://127.0.0.1/", "data:text/html;base64,PGI+"),
        "http://169.254.169.254/latest",
    ],
)
def test_other_schemes_and_hosts_are_refused_by_name(gateway: Server, peer: Peer, url: str) -> None:
    before = len(peer.requests)
    refused = ask(gateway, gateway.tenant(f"schemes-{url[:4]}"), image(url))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert len(peer.requests) == before


def begun(server: Server, key: str, num_bytes: int) -> socket.socket:
    """A request whose head declares a body of this size, of which nothing comes. It is told to go on when its
    memory is counted."""
    address = httpx.URL(server.url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=20)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\nauthorization: Bearer %s\r\ncontent-length: %d\r\n\r\n"
        % (key.encode(), num_bytes)
    )
    return connection


def told(connection: socket.socket) -> tuple[int, str]:
    """Status of what is answered before the body comes, and the code of a refusal."""
    data = connection.recv(4096)
    status = int(data.split()[1])
    while status != 100 and not data.endswith(b"}}"):
        data += connection.recv(4096)
    return status, "" if status == 100 else json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"]


@pytest.mark.attack
def test_large_bodies_have_so_much_memory_and_no_more(gateway: Server) -> None:
    greedy, other, third = (gateway.tenant(f"large-{name}") for name in ("greedy", "other", "third"))
    look = (says("look"), image("data:image/png;base64," + "A" * (3 * MIB)))
    with begun(gateway, greedy, 3 * MIB) as first:
        assert told(first) == (100, "")
        with begun(gateway, greedy, 3 * MIB) as second:
            assert told(second) == (429, "large_bodies_full")
        with begun(gateway, other, 3 * MIB) as of_other:
            assert told(of_other) == (100, "")
            with begun(gateway, third, 3 * MIB) as of_third:
                assert told(of_third) == (503, "large_bodies_full")
            small = ask(gateway, greedy, says("look"), image())
            assert small.status_code == 200, "ordinary bodies are as welcome as ever"
        until(lambda: ask(gateway, other, *look).status_code == 200)
    until(lambda: ask(gateway, greedy, *look).status_code == 200)
    for _ in range(4):  # each gives back what it had
        assert ask(gateway, greedy, *look).status_code == 200


@pytest.mark.attack
def test_no_byte_of_an_image_is_kept(gateway: Server) -> None:
    key, marker = gateway.tenant("kept-images"), "Q0FGRUJBQkU" * 20
    body = {
        "model": SEES,
        "messages": [{"role": "user", "content": [says("a"), image(PIXEL + marker)]}],
        "max_tokens": 4,
    }
    with gateway.http(key) as client:
        headers = {"Idempotency-Key": "image"}
        first, again = (client.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2))
    assert first.content == again.content
    broken = ask(gateway, key, says("a"), image(PIXEL + marker, detail="none"))
    assert broken.status_code == 400
    assert marker[:40] not in broken.text
    files = [each for each in gateway.data_dir.rglob("*") if each.is_file()]
    assert files
    assert not [each for each in files if marker[:40].encode() in each.read_bytes()]
    assert marker[:40] not in gateway.log()
