"""Non-text parts of messages (images, sounds, videos, files): checked, bounded, passed on. Pure.

Held with a margin. Most are a URL: base64 (`data:`), or an address, which the server fetches and this gateway
never does. They are in no counted prompt and in no log.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway import errors
from gateway.config import GatewayConfig
from gateway.requests.schemas import ChatMessage, ContentPart
from gateway.upstream.capabilities import MEDIA_NEEDS

MAX_ADDRESS_CHARACTERS = 8_192
PUBLIC_HOST = re.compile(
    r"https?://(?:[a-z0-9_-]{1,63}\.)+(?P<top>[a-z][a-z0-9-]{1,62})\.?(?::[0-9]{1,5})?(?:[/?#]|\Z)"
)
PRIVATE_TOPS = frozenset(
    ("arpa", "corp", "home", "internal", "intranet", "invalid", "lan", "local", "localdomain", "localhost")
).union(("private", "test"))
"""Private networks (RFC 6761, 6762, 8375; ICANN's internal, and what is used as if it were)."""
MAX_WORD_CHARACTERS = 256
"""Of a file's name and a sound's format."""
CHARACTERS_PER_TOKEN = 128
"""Of the base64 of non-images: a second of video or speech is kilobytes and tens of tokens."""
DETAILS = ("auto", "low", "high")
ID_RANGE = 2**15
"""Of the ids that stand for an image in a prompt; they are no token ids."""


class MediaType(NamedTuple):
    """How a type of part holds its content."""

    key: str
    kind: str
    """Prefix of the media type of its data URL."""


TYPES = {
    "image_url": MediaType("url", "image/"),
    "input_audio": MediaType("data", "audio/"),
    "audio_url": MediaType("url", "audio/"),
    "video_url": MediaType("url", "video/"),
    "file": MediaType("file_data", ""),
}


def media_part(part: ContentPart, path: str, config: GatewayConfig) -> dict[str, Any]:
    """Raises `ApiError`."""
    found, path = getattr(part, part.type), f"{path}.{part.type}"
    if found is None:
        raise errors.bad_request(
            f"Missing required parameter: '{path}'.", path, code="missing_required_parameter"
        )
    shown: dict[str, Any] = {"url": found} if isinstance(found, str) else msgspec.to_builtins(found)
    key, kind = TYPES[part.type]
    check = _require_size if key == "data" else _require_url
    check(shown[key], f"{path}.{key}", kind, config)
    if shown.get("detail", DETAILS[0]) not in DETAILS:
        raise errors.bad_request(
            f"Invalid '{path}.detail': '{shown['detail'][:32]}' is not one of {', '.join(DETAILS)}.",
            f"{path}.detail",
        )
    for name in ("format", "filename"):
        if len(shown.get(name, "")) > MAX_WORD_CHARACTERS:
            raise errors.bad_request(
                f"Invalid '{path}.{name}': it has more than {MAX_WORD_CHARACTERS} characters.",
                f"{path}.{name}",
            )
    return {"type": part.type, part.type: shown}


def _require_url(url: str, path: str, kind: str, config: GatewayConfig) -> None:
    scheme, colon, rest = url[:16].lower().partition(":")
    if scheme == "data" and colon:
        head = url[:128].lower()
        if not head.startswith(f"data:{kind}") or ";base64," not in head:
            raise errors.bad_request(
                f"Invalid '{path}': a data URL must be of the form 'data:{kind}...;base64,...'.", path
            )
        _require_size(url, path, kind, config)
        return
    if scheme not in ("http", "https") or not rest.startswith("//"):
        name = f"the scheme '{scheme}'" if colon else "no scheme"
        raise errors.bad_request(
            f"Invalid '{path}': it has {name}; send a data URL, or an http or https address.", path
        )
    if config.image_addresses == "no":
        raise errors.bad_request(
            f"Invalid '{path}': this server takes no addresses of images and the like; send a data URL.", path
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
            " images.example.org, and no number or name of a private network; send a data URL.",
            path,
        )


def _has_public_name(url: str) -> bool:
    """By its spelling, more strictly than servers read URLs; what it resolves to only the server knows."""
    name = PUBLIC_HOST.match(url.lower())
    return name is not None and name["top"] not in PRIVATE_TOPS


def _require_size(data: str, path: str, _: str, config: GatewayConfig) -> None:
    if len(data) > config.max_image_bytes:
        raise errors.bad_request(
            f"Invalid '{path}': it has {len(data)} bytes as base64; the most is {config.max_image_bytes}."
            " Send a smaller one.",
            path,
        )


def needs_of(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """Needs of the parts, and the field of the first that has each."""
    found: dict[str, str] = {}
    for index, message in enumerate(messages):
        for position, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if (need := MEDIA_NEEDS.get(part.type)) is not None:
                found.setdefault(need, f"messages[{index}].content[{position}]")
    return found


def media_bytes(messages: Sequence[ChatMessage]) -> int:
    found = 0
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            for name, (key, _) in TYPES.items():
                if (value := getattr(part, name)) is not None:
                    found += len(value if isinstance(value, str) else getattr(value, key))
    return found


# ---------------------------------------------------------------- of checked messages


def contents_of(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for message in messages:
        if isinstance(message["content"], list):
            for part in message["content"]:
                if (name := part["type"]) != "text":
                    yield name, part[name][TYPES[name].key]


def require_number(messages: Sequence[dict[str, Any]], most: int) -> None:
    """Raises `ApiError` if there are more than one request may have."""
    found = sum(1 for _ in contents_of(messages))
    if found > most:
        raise errors.bad_request(
            f"'messages' hold {found} images and the like; the most is {most}.", "messages"
        )


def text_of(content: object) -> str:
    """The text of a message's content; text parts each on lines of their own."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


def media_ids(messages: Sequence[dict[str, Any]], tokens_each: int) -> list[int]:
    """Held: at least `tokens_each` ids of each, alike for the same content; more for long non-images."""
    found: list[int] = []
    for name, content in contents_of(messages):
        more = 0 if name == "image_url" else len(content) // CHARACTERS_PER_TOKEN
        found += [zlib.crc32(content.encode("utf-8", "surrogatepass")) % ID_RANGE] * max(tokens_each, more)
    return found
