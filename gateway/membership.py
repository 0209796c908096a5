"""Rules of membership: what sources say of a pool's engines becomes acts; what an engine proves. Pure.

A name is the identity of an engine, wherever it runs. What is heard counts for more than what is said: a
source that fails, flaps or moves a name takes away no engine that is heard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.messages import PROTOCOL_VERSION, Ready

MOST_MEMBERS = 256
STEADY_S = 10.0
"""An engine that is heard and that no source names is let go after this time; turns it gets none at once."""
QUIET_S = 5.0
"""One that is not heard for so long is looked for where else it is said to be, or let go."""
IDLE_S = 2.0
"""Nothing has run there for so long: what was settled last is acknowledged."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
OWNED = re.compile(rf"{NAME.pattern}(@[A-Za-z0-9_-]{{1,80}})?")
"""The name of one that a server started for its workers: with that server's id, as other servers call theirs
alike."""
ADDRESS = re.compile(r"(ipc|tcp)://[!-~]{1,200}")


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """What a source says of one engine."""

    name: str
    address: str
    source: str
    is_current: bool = True
    """False: the source no longer answers for it, and does not say that it has gone either."""
    keys: str = ""
    """File with its keys; empty: looked for by its name."""


@dataclass(frozen=True, slots=True)
class SeenMember:
    name: str
    address: str
    quiet_s: float = 0.0
    """Since it was heard; 0: it is."""
    idle_s: float = 0.0
    """Since something of this gateway ran there."""
    unnamed_s: float = 0.0
    """Since a source named it."""


class MemberAct(StrEnum):
    JOIN = "join"
    KEEP = "keep"
    REPLACE = "replace"
    """It joins anew, at another address."""
    LEAVE = "leave"
    """It gets no turns."""
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class MembershipPlan:
    acts: dict[str, MemberAct] = field(default_factory=dict)
    """By name."""
    places: dict[str, NamedEngine] = field(default_factory=dict)
    """Where those that stay are, by name."""
    refused: dict[str, str] = field(default_factory=dict)
    """By name: a line on what is said and not done."""


def plan(said: Iterable[NamedEngine], members: Mapping[str, SeenMember]) -> MembershipPlan:
    """`said`: of all sources, of those that fail what they said last; the first one goes first."""
    made = MembershipPlan()
    words: dict[str, list[NamedEngine]] = {}
    for word in said:
        if not OWNED.fullmatch(word.name):
            made.refused[word.name[:64]] = (
                f"its name must be 1 to 64 letters, digits, - and _ ({word.source})"
            )
        elif not ADDRESS.fullmatch(word.address):
            made.refused[word.name] = (
                f"{word.address[:200]!r} is no address like tcp://HOST:PORT ({word.source})"
            )
        elif word.is_current or word.name in members:
            words.setdefault(word.name, []).append(word)
    held = {member.address: member.name for member in members.values() if member.quiet_s == 0}
    for name in sorted(words, key=lambda name: name not in members):
        member = members.get(name)
        here = words[name] if member is None else _still_said(words[name], member)
        if not here:
            continue
        place = here[0] if member is None else _place(here, member)
        owner = held.setdefault(place.address, name)
        if owner != name:
            made.refused[name] = f"{place.address} is the address of {owner} ({place.source})"
            continue
        if len(made.acts) == MOST_MEMBERS:
            made.refused[name] = f"there are {MOST_MEMBERS} engines already ({place.source})"
            continue
        is_here = member is not None and member.address == place.address
        made.acts[name] = (
            MemberAct.JOIN if member is None else MemberAct.KEEP if is_here else MemberAct.REPLACE
        )
        made.places[name] = place
        for other in here:
            if other.address != place.address:
                made.refused[name] = (
                    f"it is said to be at {other.address}, too ({other.source}), and stays at {place.address}"
                    " while it is heard there"
                )
    for name, member in members.items():
        if name not in made.acts:
            heard_out = member.unnamed_s >= STEADY_S and member.idle_s >= IDLE_S
            is_over = member.quiet_s >= QUIET_S if member.quiet_s else heard_out
            made.acts[name] = MemberAct.REMOVE if is_over else MemberAct.LEAVE
    return made


def _still_said(words: list[NamedEngine], member: SeenMember) -> list[NamedEngine]:
    """What counts of it: while it is heard everything, later what sources answer for."""
    return words if member.quiet_s < QUIET_S else [word for word in words if word.is_current]


def _place(words: list[NamedEngine], member: SeenMember) -> NamedEngine:
    """Where the member is from now on; while it is heard, where it is."""
    addresses = [word.address for word in words]
    at = addresses.index(member.address) if member.address in addresses else None
    if member.quiet_s == 0 and at is None:
        return NamedEngine(member.name, member.address, words[0].source, keys=words[0].keys)
    if at is None:
        return words[0]
    if member.quiet_s < QUIET_S:
        return words[at]
    return next((word for word in words[at:] + words[:at] if word.address != member.address), words[at])


def objection(ready: Ready, name: str | None, tokenizer: str, block_tokens: int | None) -> str:
    """Why an engine may not serve here; empty: it may. `name` None: any; `block_tokens`: of the pool's other
    engines that are up, None: there is none."""
    if ready.protocol_version != PROTOCOL_VERSION:
        return (
            f"it speaks version {ready.protocol_version} of the protocol, and this gateway"
            f" {PROTOCOL_VERSION}: upgrade the older one"
        )
    if name is not None and ready.engine_id != name:
        return (
            f"the engine there is called {ready.engine_id!r}: start it with --engine-id {name}, or correct"
            " the name"
        )
    if ready.model.tokenizer not in ("", tokenizer):
        return "its tokenizer.json is another one than this gateway's: give both the same model files"
    if block_tokens not in (None, ready.block_tokens):
        return (
            f"its KV blocks have {ready.block_tokens} tokens, and the other engines' {block_tokens}: set"
            " engine.block_tokens alike"
        )
    return ""
