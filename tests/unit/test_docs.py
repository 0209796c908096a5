"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from ops.settings.settings import settings_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def settings_lines() -> list[str]:
    """The table of settings as `docs/settings.md` holds it."""
    lines = ["| setting | variable | default | takes | meaning |", "|---|---|---|---|---|"]
    for row in settings_table():
        default = f"`{row['default']}`" if row["default"] else ""
        accepts = row["accepts"].replace("|", "\\|")
        lines.append(f"| `{row['name']}` | `{row['variable']}` | {default} | {accepts} | {row['help']} |")
    return lines


def test_every_setting_is_documented_as_it_is() -> None:
    """On a difference, replace the table in docs/settings.md by these lines."""
    documented = [line for line in (DOCS / "settings.md").read_text().splitlines() if line.startswith("|")]

    assert settings_lines() == documented


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *DOCS.glob("*.md")]
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]

    assert broken == []


def test_invariants_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "invariants.md").read_text())
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or (test and f"def {test}(" not in (ROOT / path).read_text())
    ]

    assert len(named) >= 12
    assert missing == []
