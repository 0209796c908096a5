"""The JSON Schema of configuration files, for editors."""

from __future__ import annotations

from typing import Any

import msgspec

from tenants.config_file.document import Configuration


def json_schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Fairgate configuration",
        **msgspec.json.schema(Configuration),
    }
