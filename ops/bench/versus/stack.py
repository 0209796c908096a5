"""Interface of a stack in the comparison: a gateway before a model server, with tenants, limits and bills."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SLOTS = 16
"""Sequences that any of the servers computes in a step."""
PLACES = 96
"""Sequences whose memory is held where that is separate from the slots: more than a phase's streams."""


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """A tenant as the operator wants it; each stack grants what it can."""

    name: str
    weight: float = 1.0
    limit_tokens: int | None = None
    """Hard limit on input and output tokens together; None: none."""
    most_parallel: int | None = None
    """Most requests at once, for stacks without a queue that is fair between tenants."""


class ServedStack(Protocol):
    @property
    def url(self) -> str: ...  # of the gateway, without `/v1`

    @property
    def pid(self) -> int: ...  # root of the gateway's processes

    async def enrol(self, terms: TenantTerms) -> str:
        """Makes the tenant; its key. Raises `CannotBench`."""
        ...

    async def kill(self) -> None: ...

    async def charged_tokens(self, tenant: str) -> int:
        """Tokens on the tenant's bill, once the gateway has come back and settled. Raises `CannotBench`."""
        ...

    async def why(self, headers: Mapping[str, str], key: str) -> str | None:
        """Why the request with these response headers waited, in the stack's words; None: unexplained."""
        ...


class Contestant(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def is_fair_by_itself(self) -> bool:
        """Its queue shares by weight. Otherwise tenants get the fixed limits that an operator would set."""
        ...

    @property
    def limit_window_s(self) -> float:
        """A key's limit resets after so long; infinite: never."""
        ...

    def open(self, directory: Path) -> contextlib.AbstractAsyncContextManager[ServedStack]:
        """Runs its gateway in the block, with an empty state in `directory`."""
        ...
