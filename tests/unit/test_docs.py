"""The documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from ops.settings import policy_document
from ops.settings.document import page
from ops.settings.settings import SETTINGS
from tenants.outbox.kinds import ALERT_KINDS
from tests.support.documents import blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUNBOOK = [
    "What it means",
    "What users notice",
    "Tell the causes apart",
    "What to do",
    "When to wake whom",
]


def test_the_page_of_settings_is_the_one_that_is_generated() -> None:
    """On a difference: `python -m ops.settings.document > docs/settings.md`."""
    assert page() == (DOCS / "settings.md").read_text()


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *DOCS.rglob("*.md")]
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]

    assert broken == []


def test_each_alert_has_a_runbook_with_three_commands() -> None:
    pages = {path.stem: path for path in (DOCS / "runbooks").glob("*.md")}
    assert set(pages) == {kind.subject for kind in ALERT_KINDS}
    for path in pages.values():
        assert re.findall(r"^## (.*)$", path.read_text(), re.M) == RUNBOOK
        assert [block.is_run for block in blocks(path)] == [True] * 3, path.name


def test_invariants_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "invariants.md").read_text())
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or (test and f"def {test}(" not in (ROOT / path).read_text())
    ]

    assert len(named) >= 12
    assert missing == []


def shown_by() -> dict[str, str]:
    """The test that shows each choice and each option of policies."""
    choices = {
        f"policy.{decision} = {choice}": f"test_{decision}_{choice}".replace("-", "_")
        for decision, named in policy_document.CHOICES.items()
        for choice in named
    }
    options = {
        row.name: f"test_{row.field}"
        for row in SETTINGS
        if row.group == "policy.options" and row.field not in policy_document.CHOICES
    }
    return choices | options


def test_the_choices_of_policies_are_those_of_the_code_and_each_option_is_shown_on_a_served_engine() -> None:
    """On a difference: `python -m ops.settings.policy_document`."""
    text = policy_document.PAGE.read_text()
    assert policy_document.page(text) == text
    shown = shown_by()
    for option, path in policy_document.ELSEWHERE.items():
        assert f"def {shown.pop(option)}(" in (ROOT / path).read_text()
    existing = set(re.findall(r"^def (test_\w+)\(", (ROOT / policy_document.TESTS).read_text(), re.M))
    assert set(shown.values()) - existing == set()
    assert existing - set(shown.values()) == set(), "each test shows one choice or option"
