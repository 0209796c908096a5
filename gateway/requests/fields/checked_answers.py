"""Keeps what our own engine's answers may say, checked by the grammar library, for repeated requests."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.errors import ApiError
from gateway.requests.fields.own_answer import NAMES, OwnAnswer, OwnForm, own_answer

MOST_EACH = 32
"""Kept for one tenant."""
MOST_BYTES = 64 * 2**20
"""Of all grammars that are kept."""
_Kept = OwnAnswer | ApiError


class NeedsThread(Exception):
    """It was not checked yet, which takes too long for the event loop."""


class CheckedAnswers:
    """Thread-safe. Of several threads that ask for the same, each may check it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, OrderedDict[bytes, _Kept]] = OrderedDict()
        """By tenant and request, the longest unused first."""
        self._bytes = 0
        self._lock = threading.Lock()

    def of(
        self,
        fields: Mapping[str, Any],
        form: OwnForm,
        *,
        tenant_id: str,
        model: str,
        is_open: bool,
        is_on_loop: bool,
    ) -> OwnAnswer:
        """`own_answer`, made once. Raises `ApiError`; `NeedsThread`, if `is_on_loop`."""
        said = {name: value for name, value in fields.items() if name in NAMES}
        if not said:
            return own_answer(said, form, is_open=is_open)
        key = blake2b(msgspec.json.encode((model, form.answers is None, is_open, said))).digest()
        found = self._find(tenant_id, key)
        if found is None:
            if is_on_loop:
                raise NeedsThread
            try:
                found = own_answer(said, form, is_open=is_open)
            except ApiError as refused:
                found = refused
            self._keep(tenant_id, key, found)
        if isinstance(found, ApiError):
            raise replace(found)
        return found

    def _find(self, tenant_id: str, key: bytes) -> _Kept | None:
        with self._lock:
            of_tenant = self._kept.get(tenant_id)
            if of_tenant is None or key not in of_tenant:
                return None
            self._kept.move_to_end(tenant_id)
            of_tenant.move_to_end(key)
            return of_tenant[key]

    def _keep(self, tenant_id: str, key: bytes, found: _Kept) -> None:
        with self._lock:
            of_tenant = self._kept.setdefault(tenant_id, OrderedDict())
            self._kept.move_to_end(tenant_id)
            if key not in of_tenant:
                of_tenant[key] = found
                self._bytes += _size(found)
            while self._bytes > MOST_BYTES or len(of_tenant) > MOST_EACH:
                oldest = of_tenant if len(of_tenant) > MOST_EACH else next(iter(self._kept.values()))
                self._bytes -= _size(oldest.popitem(last=False)[1])
                if not oldest:
                    self._kept.popitem(last=False)


def _size(kept: _Kept) -> int:
    grammar = kept.grammar if isinstance(kept, OwnAnswer) else None
    return 1024 + (0 if grammar is None else len(grammar.source))
