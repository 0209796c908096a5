"""Kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.quick_interpreter import quick_interpreter


@pytest.fixture(autouse=True, scope="package")
def interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield
