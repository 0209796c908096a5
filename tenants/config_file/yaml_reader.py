"""Reads a configuration file: YAML 1.2 of plain values, with the line of each.

The parser's events are taken one by one: input that is too deep or refused ends the reading at once. Anchors,
aliases and tags are refused: no file is larger than it looks. `yes` and `on` are words (YAML 1.2)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.inspect import ListType, LiteralType, Metadata, StructType, Type, UnionType, type_info
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from tenants.config_file.base import ConfigInvalid, Place, as_text
from tenants.config_file.document import Configuration, configuration_type
from tenants.config_file.parts import Resources
from tenants.resources.all import RESOURCES

MAX_FILE_BYTES = 4 * 2**20
MAX_DEPTH = 20
MAX_ITEMS = 100_000
"""Keys, values, lists and mappings: each takes the parser some 0.1 ms, and a byte may be one."""
MAX_KEY_CHARS = 256

_NO_TEXT = re.compile("[\\x00\\ud800-\\udfff]")
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,3})?")
_NOT_FINITE = re.compile(r"([-+]?\.(inf|Inf|INF))|\.(nan|NaN|NAN)")


class BadFile(ValueError):
    """The file cannot be read: the line (from 1; 0: none) and what is wrong there."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.line = line


@dataclass
class Lines:
    """Lines of values."""

    line: int
    inside: dict[str | int, Lines] = field(default_factory=dict)

    def of(self, place: Place) -> int:
        """The line of a place, or of its nearest existing parent."""
        lines = self
        for part in place:
            following = lines.inside.get(part)
            if following is None:
                break
            lines = following
        return lines.line


@dataclass(frozen=True)
class ConfigFileText:
    wanted: Configuration
    lines: Lines

    def bad(self, error: ConfigInvalid) -> BadFile:
        return BadFile(self.lines.of(error.place), f"{error.field}: {error.message}")


def read_file(text: bytes, resources: Resources = RESOURCES) -> ConfigFileText:
    """Raises `BadFile`."""
    value, lines = read_yaml(text)
    try:
        return ConfigFileText(converted(value, resources), lines)
    except ConfigInvalid as error:
        raise BadFile(lines.of(error.place), f"{error.field}: {error.message}") from None


def read_yaml(text: bytes) -> tuple[Any, Lines]:
    """The value of one YAML document, and its lines. Raises `BadFile`."""
    if len(text) > MAX_FILE_BYTES:
        raise BadFile(0, f"the file has {len(text)} bytes; the most is {MAX_FILE_BYTES}: divide it")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise BadFile(line, "is not UTF-8: save the file as UTF-8") from None
    parser = YAML(typ="safe", pure=True)
    try:
        return _document(_bounded(parser.parse(decoded)))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context or "is not YAML").split())
        raise BadFile(0 if mark is None else mark.line + 1, f"is not YAML: {problem}") from None
    except YAMLError as error:
        raise BadFile(_line_of(error, decoded), f"is not YAML: {' '.join(str(error).split())}") from None


def converted(value: Any, resources: Resources = RESOURCES) -> Configuration:
    """Raises `ConfigInvalid`."""
    shape = configuration_type(resources)
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `")
        place = _place(where.removesuffix("`"))
        if named := re.search(r"unknown field `(.*)`", what):
            raise ConfigInvalid(
                (*place, named[1]), "there is no such key; `fairgate export --schema` has them all"
            ) from None
        if missing := re.search(r"missing required field `(.*)`", what):
            raise ConfigInvalid(place, f"its {missing[1]!r} is missing") from None
        if unknown := re.fullmatch(r"Invalid enum value (.*)", what, re.DOTALL):
            allowed = ", ".join(_words_at(type_info(shape), place))
            raise ConfigInvalid(place, f"{unknown[1][:40]} is not one of: {allowed}") from None
        hint = ": put it in quotes" if what.startswith("Expected `str") else ""
        raise ConfigInvalid(place, what[:1].lower() + what[1:].replace("`", "") + hint) from None


def _words_at(kind: Type, place: Place) -> list[str]:
    """The words that may stand at a place of the file's shape."""
    if isinstance(kind, Metadata):
        return _words_at(kind.type, place)
    if isinstance(kind, UnionType):
        return [word for type_ in kind.types for word in _words_at(type_, place)]
    if isinstance(kind, LiteralType) and not place:
        return [str(word) for word in kind.values]
    if isinstance(kind, ListType):
        return _words_at(kind.item_type, place[1:]) if place else ["a list"]
    if isinstance(kind, StructType) and place:
        types = [field.type for field in kind.fields if field.name == place[0]]
        return _words_at(types[0], place[1:]) if types else []
    return []


def _bounded(events: Iterable[Any]) -> Iterator[Any]:
    """The events of a file, up to the bound. Raises `BadFile`."""
    items = 0
    for event in events:
        items += type(event).__name__ in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent")
        if items > MAX_ITEMS:
            raise BadFile(_line(event), f"here the file has more than {MAX_ITEMS} keys and values: divide it")
        yield event


def _document(events: Iterator[Any]) -> tuple[Any, Lines]:
    """The only document of a stream."""
    document: tuple[Any, Lines] | None = None
    for event in events:
        kind = type(event).__name__
        if kind == "DocumentStartEvent":
            if document is not None:
                raise BadFile(_line(event), "a second document begins: one file is one document")
            if event.version not in (None, (1, 2)):
                raise BadFile(_line(event), "says another version of YAML: it is read as YAML 1.2")
        elif kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent", "AliasEvent"):
            document = _value(event, events, (), 0)
    if document is None or document[0] is None:
        raise BadFile(1, "the file is empty: it begins with `version: 1`")
    return document


def _value(event: Any, events: Iterator[Any], place: Place, depth: int) -> tuple[Any, Lines]:
    kind, lines = type(event).__name__, Lines(_line(event))
    if kind == "AliasEvent" or event.anchor is not None:
        raise BadFile(lines.line, f"{as_text(place)}: anchors and aliases are not taken: write the value out")
    if event.tag is not None:
        raise BadFile(lines.line, f"{as_text(place)}: tags are not taken: leave out {str(event.tag)[:64]!r}")
    if kind == "ScalarEvent":
        return _scalar(event, place), lines
    if depth >= MAX_DEPTH:
        raise BadFile(lines.line, f"{as_text(place)}: is nested more than {MAX_DEPTH} deep")
    if kind == "SequenceStartEvent":
        items: list[Any] = []
        while type(following := next(events)).__name__ != "SequenceEndEvent":
            at = len(items)
            item, lines.inside[at] = _value(following, events, (*place, at), depth + 1)
            items.append(item)
        return items, lines
    mapping: dict[str, Any] = {}
    while type(following := next(events)).__name__ != "MappingEndEvent":
        key = _key(following, place)
        if key in mapping:
            first = lines.inside[key].line
            raise BadFile(_line(following), f"{as_text((*place, key))}: stands in line {first} already")
        mapping[key], inside = _value(next(events), events, (*place, key), depth + 1)
        lines.inside[key] = Lines(_line(following), inside.inside)
    return mapping, lines


def _key(event: Any, place: Place) -> str:
    line = _line(event)
    if type(event).__name__ != "ScalarEvent" or event.anchor is not None or event.tag is not None:
        raise BadFile(line, f"{as_text(place)}: a key must be a word")
    key = str(event.value)
    if not key or len(key) > MAX_KEY_CHARS or _NO_TEXT.search(key):
        raise BadFile(line, f"{as_text(place)}: a key has 1 to {MAX_KEY_CHARS} characters")
    if key == "<<" and event.implicit[0]:
        raise BadFile(line, f"{as_text(place)}: merge keys are not taken: write the values out")
    return key


def _scalar(event: Any, place: Place) -> Any:
    """A plain scalar by the core schema; quoted ones are text."""
    text = str(event.value)
    if _NO_TEXT.search(text):  # written as an escape
        raise BadFile(_line(event), f"{as_text(place)}: holds NUL or half a character, which no text may")
    if not event.implicit[0]:
        return text
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text[2:] if base != 10 else text, base)
    is_float = _FLOAT.fullmatch(text) is not None
    if is_float and math.isfinite(float(text)):
        return float(text)
    if is_float or _NOT_FINITE.fullmatch(text):  # 1e999 is beyond all numbers
        raise BadFile(_line(event), f"{as_text(place)}: {text} is no number that can be taken")
    return text


def _place(path: str) -> Place:
    """`$.tenants[3].labels[...]` as a place; what is in brackets without a number ends it."""
    place: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[]+)|\[([^\]]*)\]", path):
        if index and not index.isdigit():
            break
        place.append(int(index) if index else name)
    return tuple(place)


def _line(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1


def _line_of(error: Exception, text: str) -> int:
    position = getattr(error, "position", None)
    return text.count("\n", 0, position) + 1 if isinstance(position, int) else 0
