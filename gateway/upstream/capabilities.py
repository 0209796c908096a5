"""What a server of a model can do beyond plain text, and what a request needs of it.

Pure. A need is a word of `Capability`, or a request field's name as `need_of_field` writes it. A request goes
only to servers that lack none of its needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import force_setattr

FIELD_NEED = "field:"


class Capability(StrEnum):
    """Words for what a server can do; also the words of the setting `capabilities`."""

    TEXT = "text"
    """Chat or text completions."""
    TOOLS = "tools"
    """`tools`, where the model decides whether to call one."""
    FORCED_TOOLS = "forced_tools"
    """`tool_choice: "required"` or a named function: the server's grammar sees to a call."""
    JSON_OBJECT = "json_object"
    """`response_format` of the type `json_object`."""
    JSON_SCHEMA = "json_schema"
    """`response_format` of the type `json_schema`."""
    REASONING = "reasoning"
    """`reasoning_effort`."""
    IMAGES = "images"
    """Image parts in messages."""
    AUDIO = "audio"
    """Parts of sound in messages."""
    EXTRA_FIELDS = "extra_fields"
    """The request fields of its kind of server (`openai/server_kinds.py`)."""
    EMBEDDINGS = "embeddings"
    """`POST /v1/embeddings`."""
    RERANK = "rerank"
    """`POST /v1/rerank`."""


class Endpoint(StrEnum):
    """Needs of plain text: few servers refuse one of them, and those that do are found by trial."""

    CHAT = "endpoint:chat"
    TEXT = "endpoint:text"
    """`POST /v1/completions`."""


COUNTED_BY_SERVER = frozenset(
    {
        Capability.TOOLS,
        Capability.FORCED_TOOLS,
        Capability.REASONING,
        Capability.IMAGES,
        Capability.AUDIO,
    }
)
"""What only the server can count the tokens of: it is charged by the server's usage, so a server that sends
none is not given it."""


def need_of_field(name: str) -> str:
    """The need of a server that takes this request field."""
    return FIELD_NEED + name


MEDIA_NEEDS: Mapping[str, str] = {
    "image_url": Capability.IMAGES,
    "input_audio": Capability.AUDIO,
    "audio_url": Capability.AUDIO,
    "video_url": need_of_field("video_url"),
    "file": need_of_field("file"),
}
"""What a part of a message that is no text needs, by its type. Nothing small shows whether a server takes
videos and files: its operator names them in `fields`."""


class Capabilities(msgspec.Struct, frozen=True):
    """What one server can do, as far as is known."""

    words: frozenset[str] = frozenset()
    """Of `Capability`."""
    fields: frozenset[str] = frozenset()
    """Names of further request fields that it takes."""
    untried: frozenset[str] = frozenset()
    """Words of which it is not known yet whether it can."""
    kind: str = ""
    """What it runs, as `ServerKind` names it; empty: our own engine."""
    tells_usage: bool = True
    """Its answers have its own token counts; otherwise nothing of `COUNTED_BY_SERVER` is among `words`."""
    refused: frozenset[str] = frozenset()
    """Of `Endpoint`: what it answers only the other of."""
    reasons: Mapping[str, str] = {}
    """By word that it cannot: why not, in its own words, a line without keys and addresses."""
    offers: frozenset[str] = frozenset()
    """All needs that it meets (derived)."""

    def __post_init__(self) -> None:
        endpoints = frozenset(Endpoint) - self.refused
        force_setattr(self, "offers", self.words.union(map(need_of_field, self.fields), endpoints))

    def does_as(self, other: Capabilities) -> bool:
        """Whether it can do what `other` can, whatever it says of the rest."""
        return (self.offers, self.untried, self.kind) == (other.offers, other.untried, other.kind)

    def lacks(self, needs: Collection[str]) -> str | None:
        """The first by name of these needs that it does not meet; None: it meets all."""
        return min((need for need in needs if need not in self.offers), default=None)

    def without_usage(self, counted_fields: frozenset[str]) -> Capabilities:
        """The same of a server whose answers have no token counts. `counted_fields`: request fields whose
        effect only such a count tells."""
        return msgspec.structs.replace(
            self,
            words=self.words - COUNTED_BY_SERVER,
            fields=self.fields - counted_fields,
            untried=self.untried - COUNTED_BY_SERVER,
            tells_usage=False,
        )

    def may_turn_out_to_meet(self, needs: Collection[str]) -> bool:
        """Whether it meets these needs, or all that it lacks of them is untried."""
        tried = Capability.EXTRA_FIELDS not in self.untried
        return all(
            need in self.offers or need in self.untried or (need.startswith(FIELD_NEED) and not tried)
            for need in needs
        )


class ServerOffer(msgspec.Struct, frozen=True):
    """One server of a model as a request finds it."""

    replica_id: str
    capabilities: Capabilities
    is_up: bool


PLAIN_TEXT = Capabilities(frozenset({Capability.TEXT}))
"""Our own engine: chat and text completions, and nothing beyond."""
