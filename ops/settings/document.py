"""Writes `docs/settings.md` from the settings: `python -m ops.settings.document > docs/settings.md`."""

from __future__ import annotations

import re

from ops.settings.settings import SETTINGS

HEAD = """\
# Settings

A flag (`engine.threads` is `--engine-threads`) wins over the environment (`FAIRGATE_ENGINE_THREADS`; of
`policy.name` it is `FAIRGATE_POLICY`), the environment over the TOML file named by `--config` (`[engine]`
`threads = 8`), that over the default. A name or a value that is not understood stops the start.
Of the secrets `database_url`, `redis_url` and `pepper` a variable may name the file that holds the value:
`FAIRGATE_PEPPER_FILE=/run/secrets/pepper`.
`fairgate serve --help-all` shows this list. Here `1 to 9` is a whole number, `1 to 9 s` a number of seconds.

| setting | default | takes | meaning |
|---|---|---|---|
"""


def page() -> str:
    lines = [
        f"| `{row.name}` | {f'`{row.default_text}`' if row.default_text else ''}"
        f" | {_takes(row.kind.accepts)} | {row.help} |"
        for row in SETTINGS
    ]
    return HEAD + "\n".join(lines) + "\n"


def _takes(accepts: str) -> str:
    in_seconds = re.sub(r"a number of seconds from (\S+ to \S+)", r"\1 s", accepts)
    return in_seconds.replace("a whole number from ", "").replace("|", chr(92) + "|")


if __name__ == "__main__":
    print(page(), end="")
