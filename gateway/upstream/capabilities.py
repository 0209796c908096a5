"""What a server of a model can do beyond plain text, and what a request needs of it. Pure.

A need is a `Capability` or a request field (`need_of_field`); a server must meet all of a request's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import force_setattr

FIELD_NEED = "field:"


class Capability(StrEnum):
    """Also the words of the setting `capabilities`."""

    TEXT = "text"
    """Chat or text completions."""
    TOOLS = "tools"
    """`tools`, if the model decides whether to call one."""
    FORCED_TOOLS = "forced_tools"
    """`tool_choice: "required"` or a named function, ensured by the server's grammar."""
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REASONING = "reasoning"
    """`reasoning_effort`."""
    IMAGES = "images"
    AUDIO = "audio"
    EXTRA_FIELDS = "extra_fields"
    """The request fields of its kind of server (`openai/server_kinds.py`)."""
    EMBEDDINGS = "embeddings"
    """`POST /v1/embeddings`."""
    RERANK = "rerank"
    """`POST /v1/rerank`."""


class Endpoint(StrEnum):
    """Needs of plain text: few servers refuse one of them, and those are found by trial."""

    CHAT = "endpoint:chat"
    TEXT = "endpoint:text"
    """`POST /v1/completions`."""


COUNTED_BY_SERVER = frozenset(
    {Capability.TOOLS, Capability.FORCED_TOOLS, Capability.REASONING, Capability.IMAGES, Capability.AUDIO}
)
"""Only the server can count these, so servers that send no usage do not get them."""


def need_of_field(name: str) -> str:
    return FIELD_NEED + name


MEDIA_NEEDS: Mapping[str, str] = {
    "image_url": Capability.IMAGES,
    "input_audio": Capability.AUDIO,
    "audio_url": Capability.AUDIO,
    "video_url": need_of_field("video_url"),
    "file": need_of_field("file"),
}
"""By type of message part. Operators name videos and files in `fields`, as no trial shows them."""


class Capabilities(msgspec.Struct, frozen=True):
    words: frozenset[str] = frozenset()
    """Of `Capability`."""
    fields: frozenset[str] = frozenset()
    """Further request fields that it takes."""
    untried: frozenset[str] = frozenset()
    """Words not yet known."""
    kind: str = ""
    """Its `ServerKind`; empty: our own engine."""
    tells_usage: bool = True
    """Its answers have token counts; otherwise nothing of `COUNTED_BY_SERVER` is among `words`."""
    refused: frozenset[str] = frozenset()
    """Of `Endpoint`: the one that it does not answer."""
    reasons: Mapping[str, str] = {}
    """By missing word: why, in one line without keys and addresses."""
    offers: frozenset[str] = frozenset()
    """All needs that it meets (derived)."""

    def __post_init__(self) -> None:
        endpoints = frozenset(Endpoint) - self.refused
        force_setattr(self, "offers", self.words.union(map(need_of_field, self.fields), endpoints))

    def does_as(self, other: Capabilities) -> bool:
        return (self.offers, self.untried, self.kind) == (other.offers, other.untried, other.kind)

    def lacks(self, needs: Collection[str]) -> str | None:
        """The first by name of the unmet needs; None: it meets all."""
        return min((need for need in needs if need not in self.offers), default=None)

    def without_usage(self, counted_fields: frozenset[str]) -> Capabilities:
        """The same server without token counts; drops `counted_fields`, which only such a count measures."""
        return msgspec.structs.replace(
            self,
            words=self.words - COUNTED_BY_SERVER,
            fields=self.fields - counted_fields,
            untried=self.untried - COUNTED_BY_SERVER,
            tells_usage=False,
        )

    def may_turn_out_to_meet(self, needs: Collection[str]) -> bool:
        """Whether it meets these needs, or lacks only untried ones."""
        tried = Capability.EXTRA_FIELDS not in self.untried
        return all(
            need in self.offers or need in self.untried or (need.startswith(FIELD_NEED) and not tried)
            for need in needs
        )


class ServerOffer(msgspec.Struct, frozen=True):
    replica_id: str
    capabilities: Capabilities
    is_up: bool


PLAIN_TEXT = Capabilities(frozenset({Capability.TEXT}))
