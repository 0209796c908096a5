"""The lock of packages: each required one at its version, with hashes."""

from __future__ import annotations

import re

import pytest

from ops.locked import LOCKS, ROOT, installed, pins, problems, subset

PINNED = "a-b==1.0 \\\n    --hash=sha256:" + "0" * 64 + " \\\n    --hash=sha256:" + "1" * 64 + "\n"


@pytest.mark.parametrize(
    ("text", "needed", "wrong"),
    [
        (PINNED, {"a-b": "1.0"}, []),
        (PINNED, {"a-b": "1.0", "c": "2"}, ["c 2 is required and not locked"]),
        ("a_b==1.0\n", {"a-b": "1.0"}, ["a-b 1.0 is locked without a hash"]),
        (PINNED, {"a-b": "1.1"}, ["a-b is locked at 1.0; installed: 1.1"]),
    ],
)
def test_a_lock_that_is_wrong_says_how(text: str, needed: dict[str, str], wrong: list[str]) -> None:
    assert list(problems(pins(text), needed)) == wrong


def test_every_locked_package_has_hashes_and_stands_in_one_file() -> None:
    first, second = (pins((ROOT / file).read_text()) for file in LOCKS)
    assert all(hashes for _, hashes in (first | second).values())
    assert len(first) > 40
    assert len(second) > 40
    assert not first.keys() & second.keys()


def test_the_part_of_the_lock_for_an_image_has_the_hashes_and_nothing_else() -> None:
    text = PINNED + PINNED.replace("a-b", "c")
    assert pins(subset(text, ["c"])) == {"c": ("1.0", 2)}
    with pytest.raises(KeyError, match="d"):
        subset(text, ["d"])


def test_the_gateways_image_needs_no_torch_and_all_it_needs_is_locked() -> None:
    both = "".join((ROOT / file).read_text() for file in LOCKS)
    asked = re.findall(r"ops\.locked '(\S+)' > dist/(\w+)\.txt", (ROOT / "Makefile").read_text())
    images = {image: pins(subset(both, installed(root))).keys() for root, image in asked}
    # Gateways find engines by names, and keep backups, in either image.
    needed = {"psycopg", "redis", "opentelemetry-sdk", "litestar", "dnspython", "pyrage"}
    assert needed <= images["gateway"] <= images["engine"]
    assert not {"torch", "transformers", "numba", "setuptools"} & images["gateway"]
    # What torch needs is there before it: the index it comes from may have nothing else.
    assert {"setuptools", "sympy", "networkx"} <= images["engine"]
