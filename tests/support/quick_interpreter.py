"""Triton's interpreter, which puts its operators in place at every call of a function: here once a launch.

Triton itself leaves those of a function that a kernel calls in place: what the same process compiles later
fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Its kernels give the same in a third of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain, in_place = interpreter._patch_lang, list[list[Any]]()
    undo = ExitStack()

    def once(function: Any) -> Any:
        modules = [each for each in function.__globals__.values() if each is tl or each is tl.core]
        if modules in in_place:
            return None
        in_place.append(modules)
        scope = plain(function)
        undo.callback(scope.restore)
        if len(in_place) == 1:  # a launch's, which ends with a call of `restore`
            scope.restore = lambda: (in_place.clear(), undo.close())
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield
