"""Parts of messages that are no text: what is taken, what is counted of them, what is held for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config import GatewayConfig
from gateway.domain.call import Call
from gateway.errors import ApiError
from gateway.requests.inputs.media import CHARACTERS_PER_TOKEN, TYPES, media_bytes, needs_of
from gateway.requests.parse import parse_chat
from gateway.requests.schemas import ChatCompletionRequest, decode
from gateway.upstream.capabilities import MEDIA_NEEDS, Capabilities, Capability, ServerOffer
from tests.unit.gateway.requests.test_parse import MODEL, Letters, context

PIXEL = "data:image/png;base64,iVBORw0KGgo="
EACH = 20
WORDS = frozenset({Capability.TEXT, Capability.IMAGES, Capability.AUDIO})
TAKES_ALL = Capabilities(WORDS, frozenset({"video_url", "file"}), kind="vllm")
SEES = replace(MODEL, image_tokens=EACH, servers=(ServerOffer("a", TAKES_ALL, is_up=True),))
SOUND = {"data": "UklGRg==", "format": "wav"}
PDF = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}


def request(*parts: Any, **fields: Any) -> ChatCompletionRequest:
    content = [
        part
        if "type" in part and isinstance(part, dict)
        else {"type": "image_url", "image_url": {"url": part} if isinstance(part, str) else part}
        for part in parts
    ]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what"}, *content]}],
    }
    return decode(json.dumps(body | fields).encode(), ChatCompletionRequest)


def seen(*parts: Any, config: GatewayConfig | None = None, renderer: Letters | None = None) -> Call:
    asked = replace(context(renderer), model=SEES)
    if config is not None:
        asked = replace(asked, config=config)
    return parse_chat(request(*parts), asked)


def test_an_image_is_passed_as_it_came_and_held_with_a_margin() -> None:
    renderer = Letters()
    call = seen({"url": PIXEL, "detail": "low"}, "https://example.org/cat.png", renderer=renderer)
    (wording,) = call.wordings
    assert wording.messages is not None
    assert wording.messages[0]["content"] == [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}},
    ]
    assert wording.is_uncountable
    assert call.input_tokens == len("what") + 2 * EACH
    assert renderer.messages[0]["content"] == "what"  # no byte of an image is tokenised


def test_a_prompt_without_images_is_counted_as_ever() -> None:
    call = seen()
    assert (call.input_tokens, call.wordings[0].is_uncountable) == (4, False)
    assert call.wordings[0].messages is not None
    assert call.wordings[0].messages[0]["content"] == [{"type": "text", "text": "what"}]


def test_the_same_image_is_held_alike_and_another_one_is_not() -> None:
    first, again, other = (seen(url).prompts[0] for url in (PIXEL, PIXEL, PIXEL.replace("iVB", "iVA")))
    assert first == again != other


def test_the_server_decides_whether_an_uncountable_prompt_fits() -> None:
    """120 tokens are held, the context has 100: the images may be fewer tokens than that."""
    call = seen(*([PIXEL] * 5), config=GatewayConfig())
    assert call.max_tokens == SEES.context_tokens // 8
    assert call.input_tokens + call.max_tokens == SEES.context_tokens, "no more is held than fits"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("file:///etc/passwd", "url"),
        ("ftp://example.org/a.png", "url"),
        ("javascript:alert(1)", "url"),
        ("/etc/passwd", "url"),
        ("http:example.org", "url"),
        ("https://example.org/a b.png", "url"),
        ("https://example.org/\n", "url"),
        ("https://example.org/" + "a" * 9000, "url"),
        ("data:text/html;base64,PGI+", "url"),
        ("data:image/png,abc", "url"),
        ("data:image/png;base64," + "A" * 2000, "url"),
        ({"url": PIXEL, "detail": "huge"}, "detail"),
    ],
)
def test_what_is_no_image_is_refused_by_its_field(part: Any, field: str) -> None:
    config = GatewayConfig(max_image_bytes=1024)
    with pytest.raises(ApiError) as refused:
        seen(PIXEL, part, config=config)
    assert refused.value.param == f"messages[0].content[2].image_url.{field}"
    assert refused.value.status == 400


def test_the_number_of_images_is_bounded_and_a_scheme_is_named_with_the_way_out() -> None:
    with pytest.raises(ApiError, match="hold 3 images and the like; the most is 2"):
        seen(PIXEL, PIXEL, PIXEL, config=GatewayConfig(max_images=2))
    with pytest.raises(ApiError, match="the scheme 'file'; send a data URL, or an http or https"):
        seen("file:///etc/passwd")


def test_addresses_can_be_turned_off() -> None:
    config = GatewayConfig(image_addresses="no")
    assert seen(PIXEL, config=config).wordings[0].is_uncountable
    with pytest.raises(ApiError, match="takes no addresses of images"):
        seen("https://example.org/a.png", config=config)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "169.254.169.254",
        "93.184.216.34",
        "[::1]", "[2606:4700::1111]", "[::ffff:127.0.0.1]", "127%2e0.0.1", "example.org%2f.x", "１２７.0.0.1",
        "localhost", "redis", "a.localhost", "a.LOCAL", "metadata.google.internal", "internal.",
        "x.internal.",
        "example.org@127.0.0.1", "user:word@example.org", "127.0.0.1\\@example.org", "example.org\\.x",
        "", ".", "..", ".org", "a..org", "example.org:", "example.org:x", "example.org:80@127.0.0.1",
    ],
)  # fmt: skip
def test_only_full_names_of_the_internet_are_addresses_unless_all_are_allowed(host: str) -> None:
    for url in (f"http://{host}/a.png", f"HTTPS://{host}"):
        with pytest.raises(ApiError, match=r"needs a full name of the internet.*data URL") as refused:
            seen(url)
        assert refused.value.param == "messages[0].content[1].image_url.url"
    assert seen(f"http://{host}/a.png", config=GatewayConfig(image_addresses="yes")).wordings[0].messages


@pytest.mark.parametrize(
    "address",
    ["example.org", "a_b.example.co.uk:8443/a?b=c#d", "xn--bcher-kva.example.", "1.1.1.1.example.org?x"],
)
def test_a_full_name_is_an_address_of_an_image(address: str) -> None:
    assert seen(f"HTTPS://{address}").wordings[0].is_uncountable


def test_the_bytes_of_images_are_known_before_the_request_is_understood() -> None:
    asked = request(PIXEL, "https://example.org/a.png")
    assert media_bytes(asked.messages) == len(PIXEL) + len("https://example.org/a.png")
    assert needs_of(asked.messages) == {"images": "messages[0].content[1]"}
    assert needs_of(request().messages) == {}
    heard = request(part("input_audio", SOUND), part("audio_url", "https://a.example/b"), part("file", PDF))
    assert media_bytes(heard.messages) == len(SOUND["data"] + "https://a.example/b" + PDF["file_data"])
    assert needs_of(heard.messages) == {
        "audio": "messages[0].content[1]",
        "field:file": "messages[0].content[3]",
    }


def part(name: str, content: Any) -> dict[str, Any]:
    return {"type": name, name: content}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("input_audio", SOUND),
        ("audio_url", {"url": "data:audio/wav;base64,UklGRg=="}),
        ("video_url", {"url": "https://example.org/a.mp4"}),
        ("file", PDF),
        ("file", {"file_data": "data:text/plain;base64,aGk="}),
    ],
)
def test_sounds_videos_and_files_are_passed_as_they_came_and_held_by_their_length(
    name: str, content: dict[str, str]
) -> None:
    call = seen(part(name, content))
    assert call.wordings[0].messages is not None
    assert call.wordings[0].messages[0]["content"][1] == part(name, content)
    assert call.wordings[0].is_uncountable
    assert call.input_tokens == len("what") + EACH
    key = TYPES[name].key
    if content[key].startswith("http"):
        return
    call = seen(part(name, content | {key: content[key] + "A" * 40 * CHARACTERS_PER_TOKEN}))
    assert call.input_tokens == len("what") + 40


@pytest.mark.parametrize("name", MEDIA_NEEDS)
def test_a_part_goes_only_to_servers_that_take_it(name: str) -> None:
    plain = ServerOffer("a", Capabilities(frozenset({"text"}), kind="vllm"), is_up=True)
    asked = replace(context(), model=replace(SEES, servers=(plain,)))
    content = {"input_audio": SOUND, "file": PDF}.get(name, "https://example.org/a")
    with pytest.raises(ApiError, match="a does not take") as refused:
        parse_chat(request(part(name, content)), asked)
    assert refused.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("audio_url", "data:image/png;base64,AAAA", "audio_url.url"),
        ("video_url", "file:///etc/passwd", "video_url.url"),
        ("input_audio", SOUND | {"data": "A" * 2000}, "input_audio.data"),
        ("input_audio", SOUND | {"format": "w" * 300}, "input_audio.format"),
        ("file", PDF | {"filename": "a" * 300}, "file.filename"),
        ("file", PDF | {"file_data": "JVBERi0="}, "file.file_data"),
        ("file", PDF | {"file_id": "file-1"}, "file.file_id"),
        ("video_url", None, "video_url"),
    ],
)
def test_what_is_no_sound_video_or_file_is_refused_by_its_field(name: str, content: Any, field: str) -> None:
    with pytest.raises(ApiError) as refused:
        seen(part(name, content), config=GatewayConfig(max_image_bytes=1024))
    param = str(refused.value.param).replace("messages.content", "messages[0].content[1]")
    assert (refused.value.status, param) == (400, f"messages[0].content[1].{field}")
