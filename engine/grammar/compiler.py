"""Compiles grammars in a thread, keeps them for a tenant's next request, and makes the masks of a step."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from engine.grammar.closing import Closer, EndWords
from engine.grammar.source import LIMITS
from engine.grammar.state import GrammarState
from engine.messages import Grammar

MAX_KEPT = 512
MAX_KEPT_OF_TENANT = 32
MAX_WAITING_OF_TENANT = 64


class _Compiled(NamedTuple):
    pristine: LLMatcher
    end_words: EndWords


class Grammars:
    """Of one model. Tenants take turns: one that sends many grammars delays another by one compilation."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocabulary: int,
        eos_token_ids: Sequence[int],
        *,
        threads: int | None = None,
    ) -> None:
        self.mask_calls = 0
        self.mask_rows = 0
        self._words = (vocabulary + 31) // 32
        self._end_ids = list(eos_token_ids)
        text = tokenizer_file.read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(text, n_vocab=vocabulary, eos_token=self._end_ids)
        self._closer = Closer(self._tokenizer)
        self._executor = LLExecutor(threads)
        self._cache: OrderedDict[tuple[str, Grammar], _Compiled] = OrderedDict()
        self._asked: set[tuple[str, Grammar]] = set()
        # What the compiling thread shares: the tenants' queues, by turn, and what it made.
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Grammar]] = OrderedDict()
        self._made: deque[tuple[tuple[str, Grammar], _Compiled]] = deque()
        self._thread: threading.Thread | None = None

    def open(self, tenant_id: str, grammar: Grammar) -> GrammarState | None:
        """A state at the beginning. None: the grammar is being compiled; ask again."""
        self._keep_made()
        key = (tenant_id, grammar)
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return GrammarState(known.pristine.deep_copy(), self._closer, known.end_words, self._end_ids)
        if key in self._asked:
            return None
        with self._changed:
            queue = self._waiting.setdefault(tenant_id, deque())
            if len(queue) >= MAX_WAITING_OF_TENANT:
                none = LLMatcher(self._tokenizer, 'start: "."', log_level=0)
                reason = f"{len(queue)} grammars of the tenant wait to be compiled: try again later"
                return GrammarState(none, self._closer, ([], []), self._end_ids, reason)
            queue.append(grammar)
            self._asked.add(key)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile_all, name="grammars", daemon=True)
            self._thread.start()
        return None

    def _keep_made(self) -> None:
        while self._made:
            key, compiled = self._made.popleft()
            self._asked.discard(key)
            self._cache[key] = compiled
            own = [other for other in self._cache if other[0] == key[0]]
            for old in own[:-MAX_KEPT_OF_TENANT] or list(self._cache)[:-MAX_KEPT]:
                del self._cache[old]

    def masks(self, rows: Mapping[int, GrammarState]) -> dict[int, np.ndarray]:
        """The tokens that may follow, by row: `[ceil(vocabulary / 32)]` of int32, the lowest bit first."""
        out = np.zeros((len(rows), self._words), np.int32)
        free: list[tuple[LLMatcher, int]] = []
        for index, state in enumerate(rows.values()):
            if (token_id := state.next_forced()) is None:
                free.append((state.matcher, index))
            else:
                out.view(np.uint32)[index, token_id // 32] = 1 << (token_id % 32)
        if free:
            self._executor.unsafe_compute_mask_ptr(free, out.ctypes.data, self._words * 4, len(rows))
            self.mask_calls += 1
        self.mask_rows += len(rows)
        return dict(zip(rows, out, strict=True))

    def _compile_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                tenant_id, queue = self._waiting.popitem(last=False)
                grammar = queue.popleft()
                if queue:
                    self._waiting[tenant_id] = queue
            pristine = LLMatcher(self._tokenizer, grammar.source, log_level=0, limits=LIMITS)
            # The first mask builds most of the lexer, and meets what the limits refuse.
            pristine.compute_bitmask()
            compiled = _Compiled(pristine, self._closer.words(grammar.end_words))
            self._made.append(((tenant_id, grammar), compiled))
