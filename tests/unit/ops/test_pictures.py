"""The pictures of the documents are what `make pictures` draws, and show the documents' own figures."""

from __future__ import annotations

import json

import pytest

from ops.bench.versus.figures import markdown
from ops.pages.page import svg
from ops.pictures import DOCUMENTS, FIGURES, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_is_drawn_now(name: str) -> None:
    assert (DOCUMENTS / name).read_text(encoding="utf-8") == svg(PICTURES[name]()), "run: make pictures"


def test_every_drawing_of_the_documents_is_made_that_way() -> None:
    assert {path.name for path in DOCUMENTS.rglob("*.svg")} == set(PICTURES)


def test_the_table_of_the_readme_has_the_figures_of_its_picture() -> None:
    summary = json.loads((FIGURES / "versus.json").read_text())["summary"]
    assert markdown(summary) in (DOCUMENTS.parent / "README.md").read_text(encoding="utf-8")
