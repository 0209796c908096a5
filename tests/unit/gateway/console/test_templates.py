"""Templates: nothing inline, nothing from elsewhere, every field with a label, every form with its token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.console import assets

TEMPLATES = sorted((Path(assets.__file__).parent / "templates").rglob("*.html"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_keeps_to_the_content_security_policy_and_escapes(path: Path) -> None:
    text = path.read_text()
    assert not re.search(
        r"<script(?! (defer )?src=\"\{\{ asset\()|<style|\sstyle=|\son[a-z]+\s*=|javascript:|https?://|\|\s*safe|autoescape",
        text,
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_form_that_changes_something_carries_a_token(path: Path) -> None:
    forms = re.findall(r"<form.*?</form>", path.read_text(), re.DOTALL)
    # Those that only ask are sent with GET.
    changing = [form for form in forms if 'method="get"' not in form]
    assert [form for form in changing if 'method="post"' not in form or "token_field" not in form] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_field_that_is_seen_has_a_label(path: Path) -> None:
    text = path.read_text()
    fields = re.findall(r"<(?:input|select|textarea)\b[^>]*>", text)
    seen = [each for each in fields if 'type="hidden"' not in each and 'aria-hidden="true"' not in each]
    for field in seen:
        name = re.search(r'id="([^"]+)"', field)
        assert name, field
        assert re.search(rf'<label [^>]*for="{re.escape(name[1])}"', text), field
