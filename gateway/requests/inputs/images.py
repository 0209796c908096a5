"""Image parts of messages: checked and bounded, passed on as they came, held with a margin.

An image is a URL: its bytes in base64 (`data:`), or an address, which its server fetches and this gateway
never does. Neither is text: they are in no prompt that is counted here, and in no log. Pure.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from gateway import errors
from gateway.config import GatewayConfig
from gateway.requests.schemas import ChatMessage, ContentPart, ImageUrl

MAX_ADDRESS_CHARACTERS = 8_192
PUBLIC_HOST = re.compile(
    r"https?://(?:[a-z0-9_-]{1,63}\.)+(?P<top>[a-z][a-z0-9-]{1,62})\.?(?::[0-9]{1,5})?(?:[/?#]|\Z)"
)
PRIVATE_TOPS = frozenset(
    [
        *("arpa", "corp", "home", "internal", "intranet", "invalid"),
        *("lan", "local", "localdomain", "localhost", "private", "test"),
    ]
)
"""Of networks of one's own (RFC 6761, 6762, 8375; ICANN's internal, and what is used as if it were)."""
DETAILS = ("auto", "low", "high")
ID_RANGE = 2**15
"""Of the ids that stand for an image in a prompt; they are no token ids."""


def image_part(part: ContentPart, path: str, config: GatewayConfig) -> dict[str, Any]:
    """A checked part in OpenAI's form. Raises `ApiError`."""
    image = part.image_url
    if image is None:
        raise errors.bad_request(
            f"Missing required parameter: '{path}.image_url'.",
            f"{path}.image_url",
            code="missing_required_parameter",
        )
    if isinstance(image, str):
        image = ImageUrl(image)
    _require_url(image.url, f"{path}.image_url.url", config)
    shown: dict[str, Any] = {"url": image.url}
    if image.detail is not None:
        if image.detail not in DETAILS:
            raise errors.bad_request(
                f"Invalid '{path}.image_url.detail': '{image.detail[:32]}' is not one of"
                f" {', '.join(DETAILS)}.",
                f"{path}.image_url.detail",
            )
        shown["detail"] = image.detail
    return {"type": "image_url", "image_url": shown}


def _require_url(url: str, path: str, config: GatewayConfig) -> None:
    scheme, colon, rest = url[:16].lower().partition(":")
    if scheme == "data" and colon:
        head = url[:128].lower()
        if not head.startswith("data:image/") or ";base64," not in head:
            raise errors.bad_request(
                f"Invalid '{path}': a data URL must be of the form 'data:image/png;base64,...'.", path
            )
        if len(url) > config.max_image_bytes:
            raise errors.bad_request(
                f"Invalid '{path}': the image has {len(url)} bytes as base64; the most is"
                f" {config.max_image_bytes}. Send a smaller one.",
                path,
            )
        return
    if scheme not in ("http", "https") or not rest.startswith("//"):
        name = f"the scheme '{scheme}'" if colon else "no scheme"
        raise errors.bad_request(
            f"Invalid '{path}': it has {name}; an image is a data URL, or has an http or https address.", path
        )
    if config.image_addresses == "no":
        raise errors.bad_request(
            f"Invalid '{path}': this server takes no addresses of images; send the image as a data URL.", path
        )
    if len(url) > MAX_ADDRESS_CHARACTERS or not url.isprintable() or " " in url:
        raise errors.bad_request(
            f"Invalid '{path}': an address has at most {MAX_ADDRESS_CHARACTERS} printable characters without"
            " spaces.",
            path,
        )
    if config.image_addresses == "public" and not _has_public_name(url):
        raise errors.bad_request(
            f"Invalid '{path}': the host of an address needs a full name of the internet, such as"
            " images.example.org, and no number or name of a private network; send the image as a data URL.",
            path,
        )


def _has_public_name(url: str) -> bool:
    """By its spelling, and more strictly than servers read URLs: no number in any notation, no user, no
    encoded letter. What the name stands for only the server that asks for it knows."""
    name = PUBLIC_HOST.match(url.lower())
    return name is not None and name["top"] not in PRIVATE_TOPS


def first_image(messages: Sequence[ChatMessage]) -> str | None:
    """The field of the first image part; None: there is none."""
    for index, message in enumerate(messages):
        if isinstance(message.content, list):
            for position, part in enumerate(message.content):
                if part.type == "image_url":
                    return f"messages[{index}].content[{position}]"
    return None


def image_bytes(messages: Sequence[ChatMessage]) -> int:
    """How much of a request's body its images are."""
    found = 0
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.image_url is not None:
                found += len(part.image_url if isinstance(part.image_url, str) else part.image_url.url)
    return found


# ---------------------------------------------------------------- of checked messages


def urls_of(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The images of a conversation, in their order."""
    for message in messages:
        if isinstance(message["content"], list):
            for part in message["content"]:
                if part["type"] == "image_url":
                    yield part["image_url"]["url"]


def require_number(messages: Sequence[dict[str, Any]], most: int) -> None:
    """Raises `ApiError` for more images than one request may have."""
    found = sum(1 for _ in urls_of(messages))
    if found > most:
        raise errors.bad_request(f"'messages' hold {found} images; the most is {most}.", "messages")


def text_of(content: object) -> str:
    """The text of a message's content, of parts those of text, each on lines of its own."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def image_ids(messages: Sequence[dict[str, Any]], tokens_each: int) -> list[int]:
    """What is held for the images of a conversation: `tokens_each` ids of each, alike for the same image."""
    found: list[int] = []
    for url in urls_of(messages):
        found += [zlib.crc32(url.encode("utf-8", "surrogatepass")) % ID_RANGE] * tokens_each
    return found
