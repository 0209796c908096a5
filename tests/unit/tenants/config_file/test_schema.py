"""The JSON Schema knows what the reader takes, and names what can be chosen."""

from __future__ import annotations

from typing import Any

import msgspec

from tenants.config_file.document import Configuration, json_schema
from tenants.config_file.yaml_reader import read_file
from tenants.resources.all import RESOURCES
from tenants.types import Meter, Window
from tests.support.config_files import FULL


def test_the_example_has_every_key_that_there_is() -> None:
    used: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            used.update(value)
            for each in value.values():
                collect(each)
        elif isinstance(value, list):
            for each in value:
                collect(each)

    collect(msgspec.to_builtins(read_file(FULL.encode()).wanted))
    parts = json_schema(RESOURCES)["$defs"]
    names = {name for part in parts.values() for name in part["properties"]}
    weights = {"input_weight", "cached_input_weight", "output_weight", "reasoning_weight"}
    assert names - used == {"state"} | weights


def test_editors_are_told_what_can_be_chosen_and_what_is_unknown() -> None:
    parts = json_schema(RESOURCES)["$defs"]
    assert parts["ConfigLimit"]["properties"]["meter"]["enum"] == [meter.value for meter in Meter]
    window, nothing = parts["ConfigLimit"]["properties"]["window"]["anyOf"]
    assert (window["enum"], nothing) == ([one.value for one in Window], {"type": "null"})
    assert all(part["additionalProperties"] is False for part in parts.values())
    assert set(parts) == {"Configuration", *(name for name in parts if name.startswith("Config"))}
    assert json_schema(RESOURCES)["$ref"] == f"#/$defs/{Configuration.__name__}"
