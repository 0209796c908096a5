"""Where one sequence stands in its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llguidance import LLMatcher

from engine.grammar.closing import Closer, EndWords

MAX_REASON = 300


class GrammarState:
    """Moves with the tokens that were chosen. What goes wrong stays in `failed`; nothing raises."""

    def __init__(
        self,
        matcher: LLMatcher,
        closer: Closer,
        end_words: EndWords,
        end_ids: Sequence[int],
        reason: str = "",
    ) -> None:
        self.matcher = matcher
        self._closer = closer
        self._end_words = end_words
        self._end_ids = end_ids
        self._reason = reason
        self._run: list[int] | None = None
        """The tokens that must follow; None: not asked for. Kept, so that a run is the same tokens whether it
        is appended at once or chosen one by one."""
        self._ended = False

    @property
    def failed(self) -> str:
        """Why it can go no further; empty while it can."""
        return self._reason or " ".join(self.matcher.get_error().split())[:MAX_REASON]

    @property
    def is_complete(self) -> bool:
        """Nothing but the end token may follow."""
        return self.matcher.is_stopped() and not self.failed

    def accept(self, token_id: int) -> None:
        """A token that was chosen, the end token among them."""
        self._ended = token_id in self._end_ids
        if not self.is_complete:
            self.matcher.consume_token(token_id)
        elif not self._ended:
            self._reason = f"token {token_id} came after the end of the grammar"
        self._run = self._run[1:] if self._run and len(self._run) > 1 and self._run[0] == token_id else None

    def replay(self, token_ids: Iterable[int]) -> None:
        """All tokens of a sequence that goes on."""
        for token_id in token_ids:
            self.accept(token_id)

    def next_forced(self) -> int | None:
        """The token that must follow now. None: there is a choice, or there was the end."""
        if self.failed or self._ended:
            return None
        if self.matcher.is_stopped():
            return self._end_ids[0]
        if self._run is None:
            run = self.matcher.compute_ff_tokens()
            # What the tokenizer takes for one special token may be text to the grammar: then there is no run.
            self._run = run[: self.matcher.validate_tokens(run)] if run else []
        return self._run[0] if self._run else None

    def forced(self, most: int) -> list[int]:
        """At most `most` tokens that must follow, accepted by this; the end token may be the last."""
        found: list[int] = []
        while len(found) < most and (token_id := self.next_forced()) is not None:
            self.accept(token_id)
            found.append(token_id)
        return found

    def closing(self, most: int) -> list[int] | None:
        """The tokens of an end from here, not accepted. None: none of at most `most` was found."""
        return None if self.failed else self._closer.closing(self.matcher, self._end_words, most)
