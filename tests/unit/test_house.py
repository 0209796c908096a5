"""House rules that no linter knows: first docstring lines, class names, sizes of folders, words."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engine", "gateway", "kernels", "ops", "tenants")
MOST_FILES = 16
ONE_FILE_A_POLICY = "engine/scheduling/order"
SAME_NAME: dict[str, str] = {}
"""Class names that two modules may share, each with the reason."""
NEVER_SAID = (
    "by itself",
    "by themselves",
    "look again",
    "those that have",
    "which is the most",
    "go together",
)
"""Phrases of the word list in CONTRIBUTING.md that are wrong wherever users read them."""
SAID = ("README.md", "docs/**/*.md", "gateway/console/templates/**/*.html")
"""The texts that are read for them."""


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Every module of the product: path and syntax tree."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert len(paths) > 400, "the packages were not found"
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths]


def test_a_module_says_what_it_is_and_asks_no_question() -> None:
    says = {
        path: ast.get_docstring(tree) or "" for path, tree in modules() if not path.endswith("__init__.py")
    }
    assert [path for path, text in says.items() if not text] == []
    assert [path for path, text in says.items() if text.splitlines()[0].rstrip().endswith("?")] == []


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    assert {name: where for name, where in places.items() if len(where) > 1 and name not in SAME_NAME} == {}


def test_a_folder_can_be_read_at_a_glance() -> None:
    folders = Counter(
        Path(path).parent.as_posix() for path, _ in modules() if not path.endswith("__init__.py")
    )
    assert {name: n for name, n in folders.items() if n > MOST_FILES and name != ONE_FILE_A_POLICY} == {}


def test_what_users_read_has_none_of_the_phrases_that_are_always_wrong() -> None:
    texts = {path: " ".join(path.read_text().lower().split()) for name in SAID for path in ROOT.glob(name)}
    assert len(texts) > 20, "the texts were not found"
    found = [f"{path.name}: {said}" for path, text in texts.items() for said in NEVER_SAID if said in text]
    assert found == []
