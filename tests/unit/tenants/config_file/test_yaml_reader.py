"""What a configuration file may hold, and what each bad one is told: the line and the key."""

from __future__ import annotations

import pytest

from tenants.config_file.base import ConfigInvalid, as_text, place_of
from tenants.config_file.yaml_reader import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_ITEMS,
    BadFile,
    read_file,
    read_yaml,
)

BEGIN = "version: 1\ntenants:\n"


def refusal(text: str | bytes) -> BadFile:
    with pytest.raises(BadFile) as refused:
        read_file(text if isinstance(text, bytes) else text.encode())
    return refused.value


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (f"{BEGIN}- name: a\n  weight: 1\n  weight: 2\n", 5, "tenants[0].weight: stands in line 4 already"),
        (f"{BEGIN}- &a {{name: a}}\n- *a\n", 3, "tenants[0]: anchors and aliases are not taken"),
        (f"{BEGIN}- *a\n", 3, "anchors and aliases are not taken"),
        (f"{BEGIN}- name: !!str a\n", 3, "tenants[0].name: tags are not taken"),
        (f"{BEGIN}- name: a\n  wieght: 2\n", 4, "tenants[0].wieght: there is no such key"),
        (f"{BEGIN}- weight: 2\n", 3, "tenants[0]: its 'name' is missing"),
        (f"{BEGIN}- name: 7\n", 3, "tenants[0].name: expected str, got int: put it in quotes"),
        (f"{BEGIN}- name: a\n  weight: .nan\n", 4, "tenants[0].weight: .nan is no number"),
        (f"{BEGIN}- name: a\n  weight: 1e999\n", 4, "tenants[0].weight: 1e999 is no number"),
        (f"{BEGIN}- name: a\n  weight: heavy\n", 4, "tenants[0].weight: expected float"),
        (f"{BEGIN}- name: a\n  labels: {{team: x}}\n", 4, "tenants[0].labels: expected array"),
        (f"{BEGIN}\t- name: a\n", 3, "is not YAML"),
        (f"{BEGIN}- name: [a\n", 4, "is not YAML"),
        (f"{BEGIN}- ? [a]\n  : b\n", 3, "tenants[0]: a key must be a word"),
        (f"{BEGIN}- <<: {{name: a}}\n", 3, "merge keys are not taken"),
        (f"{BEGIN}---\nversion: 1\n", 3, "a second document begins"),
        ("%YAML 1.1\n---\nversion: 1\n", 2, "it is read as YAML 1.2"),
        ("version: 1\nx: \x07\n", 2, "is not YAML"),
        (b"version: 1\nx: \xff\n", 2, "is not UTF-8"),
        (f'{BEGIN}- name: "\\ud800"\n', 3, "tenants[0].name: holds NUL or half a character"),
        (f'{BEGIN}- name: "a\\0"\n', 3, "tenants[0].name: holds NUL or half a character"),
        ("version: 2\n", 1, "version: 2 is not one of: 1"),
        (f"{BEGIN}- name: a\n  state: gone\n", 4, "tenants[0].state: 'gone' is not one of: absent, present"),
        (f"{BEGIN}- name: a\n  status: off\n", 4, "status: 'off' is not one of: active, suspended"),
        (f"{BEGIN}- name: a\n  models: some\n", 4, "models: 'some' is not one of: a list, all"),
        (
            f"{BEGIN}- name: a\n  keys:\n  - name: k\n    tiers: none\n",
            6,
            "tenants[0].keys[0].tiers: 'none' is not one of: a list, tenant",
        ),
        ("# nothing\n", 1, "the file is empty"),
        ("- a\n", 1, "the file: expected object"),
        ("version: 1\nx: " + "[" * 40, 2, f"is nested more than {MAX_DEPTH} deep"),
        ("version: 1\n" + "- " * 3_000, 2, "is"),
    ],
)
def test_a_bad_file_is_told_line_and_key(text: str | bytes, line: int, words: str) -> None:
    error = refusal(text)
    assert (error.line, words in str(error)) == (line, True), str(error)


def test_a_bomb_of_anchors_ends_at_its_first_anchor() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{name}: &{name} [*{before}, *{before}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert refusal(bomb).line == 1


def test_a_file_of_too_many_values_is_read_no_further_than_that() -> None:
    lines = MAX_ITEMS // 10
    error = refusal("version: 1\nx:\n" + "- [a,a,a,a,a,a,a,a,a]\n" * (2 * lines))
    assert f"more than {MAX_ITEMS} keys and values" in str(error)
    assert error.line == lines + 2


def test_a_file_that_is_too_large_is_not_parsed() -> None:
    error = refusal(b"\x00" * (MAX_FILE_BYTES + 1))
    assert str(MAX_FILE_BYTES) in str(error)


def test_words_are_values_by_the_core_schema_of_yaml_1_2() -> None:
    text = b"""\
words: [yes, no, on, off, 'true', "1", 2026-01-31, 1_000, 0777, 1e3x, =]
values: [true, FALSE, ~, null, 12, -3, 0o17, 0x1F, 1.5, 1e3, .5, 0777]
"""
    value, _ = read_yaml(text)
    assert value["words"] == [
        *("yes", "no", "on", "off", "true", "1", "2026-01-31", "1_000", 777, "1e3x", "=")
    ]
    assert value["values"] == [True, False, None, None, 12, -3, 15, 31, 1.5, 1000.0, 0.5, 777]


def test_json_is_a_file_too() -> None:
    assert read_file(b'{"version": 1, "tenants": [{"name": "a"}]}').wanted.tenants[0].name == "a"


def test_a_refusal_of_a_value_has_its_line() -> None:
    read = read_file(f"{BEGIN}- name: a\n\n  # a comment\n  limits:\n  - meter: x\n    amount: 1\n".encode())
    place = ("tenants", 0, "limits", 0, "amount")
    assert read.bad(ConfigInvalid(place, "no")).line == 8
    assert read.bad(ConfigInvalid((*place[:-1], "window"), "is missing")).line == 7
    assert place_of(as_text(place)) == place
