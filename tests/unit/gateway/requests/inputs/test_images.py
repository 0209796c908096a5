"""Image parts of messages: what is taken, what is counted of them, what is held for them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.domain.call import Call
from gateway.errors import ApiError
from gateway.requests.inputs.images import first_image, image_bytes
from gateway.requests.parse import parse_chat
from gateway.requests.schemas import ChatCompletionRequest, decode
from gateway.upstream.capabilities import Capabilities, Capability, ServerOffer
from tests.unit.gateway.requests.test_parse import MODEL, Letters, context

PIXEL = "data:image/png;base64,iVBORw0KGgo="
EACH = 20
WORDS = frozenset({Capability.TEXT, Capability.IMAGES})
SEES = dataclasses.replace(
    MODEL, image_tokens=EACH, servers=(ServerOffer("a", Capabilities(WORDS), is_up=True),)
)


def request(*parts: Any, **fields: Any) -> ChatCompletionRequest:
    content = [
        {"type": "image_url", "image_url": {"url": part} if isinstance(part, str) else part} for part in parts
    ]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what"}, *content]}],
    }
    return decode(json.dumps(body | fields).encode(), ChatCompletionRequest)


def seen(*parts: Any, config: GatewayConfig | None = None, renderer: Letters | None = None) -> Call:
    asked = dataclasses.replace(context(renderer), model=SEES)
    if config is not None:
        asked = dataclasses.replace(asked, config=config)
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
    assert call.wordings[0].messages[0]["content"] == "what"


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


def test_a_scheme_is_named_and_the_way_out() -> None:
    with pytest.raises(ApiError, match="the scheme 'file'; an image is a data URL, or has an http or https"):
        seen("file:///etc/passwd")


def test_the_number_of_images_is_bounded() -> None:
    with pytest.raises(ApiError, match="hold 3 images; the most is 2"):
        seen(PIXEL, PIXEL, PIXEL, config=GatewayConfig(max_images=2))


def test_addresses_can_be_turned_off() -> None:
    config = GatewayConfig(image_addresses="no")
    assert seen(PIXEL, config=config).wordings[0].is_uncountable
    with pytest.raises(ApiError, match="takes no addresses of images"):
        seen("https://example.org/a.png", config=config)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "169.254.169.254",
            "93.184.216.34",
        ),
        *(
            "[::1]",
            "[2606:4700::1111]",
            "[::ffff:127.0.0.1]",
            "127%2e0.0.1",
            "example.org%2f.x",
            "１２７.0.0.1",
        ),
        *(
            "localhost",
            "redis",
            "a.localhost",
            "a.LOCAL",
            "metadata.google.internal",
            "internal.",
            "x.internal.",
        ),
        *("example.org@127.0.0.1", "user:word@example.org", "127.0.0.1\\@example.org", "example.org\\.x"),
        *("", ".", "..", ".org", "a..org", "example.org:", "example.org:x", "example.org:80@127.0.0.1"),
    ],
)
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
    assert image_bytes(asked.messages) == len(PIXEL) + len("https://example.org/a.png")
    assert first_image(asked.messages) == "messages[0].content[1]"
    assert first_image(request().messages) is None
