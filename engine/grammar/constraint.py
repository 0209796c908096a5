"""`Constraint`: what a sequence's grammar decides between two steps. Pure.

Some tokens follow by the grammar alone: they are not sampled. Where the shortest end of an answer is known,
an answer that is cut is closed: a chosen token after which the end would not fit any more is replaced by the
end. The end is not searched after every token: one token makes it at most `growth_tokens` longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.grammar.state import GrammarState
from engine.messages import Submit


@dataclass(slots=True)
class Constraint:
    state: GrammarState
    growth_tokens: int
    closes: bool
    """Its end is known wherever it is."""
    jumps: bool
    """Tokens that must follow are not sampled; they are where the client wants log probabilities."""
    end_token: int
    end: list[int] = field(default_factory=list)
    """One from the token `end_at` on."""
    end_at: int = -1
    look_at: int = 0
    """Emitted tokens at which an end is searched again."""

    @classmethod
    def of(cls, submit: Submit, state: GrammarState, emitted: list[int], end_token: int) -> Constraint:
        """`emitted`: an imported sequence's tokens so far."""
        assert submit.grammar is not None
        grammar = submit.grammar
        jumps = submit.sampling.logprobs is None
        made = cls(state, grammar.growth_tokens, grammar.kept_tokens > 0, jumps, end_token)
        # At its beginning first: one that is not closed there stays so, wherever it goes on.
        made.closes = made.closes and made._fits(0, submit.max_tokens)
        state.replay(emitted)
        if emitted and made.closes:
            made.closes = made._fits(len(emitted), submit.max_tokens)
        return made

    def take(self, token_id: int, emitted: int, most: int) -> list[int] | None:
        """Accepts a chosen token, number `emitted` of at most `most`. Returns the end that replaces it where
        the answer could not be closed after it; None: it stays."""
        self.state.accept(token_id)
        if not self.closes or self.state.is_complete or emitted < self.look_at:
            return None
        if self._fits(emitted, most):
            return None
        self.closes = False
        return self.end if self.end_at == emitted - 1 else None

    def follow(self, emitted: int, now: int, most: int) -> list[int]:
        """Tokens that must follow the `emitted` ones, at most to the number `now`; it accepts them."""
        if not self.jumps or now <= emitted or self.state.failed:
            return []
        token_ids = self.state.forced(now - emitted)
        after = emitted + len(token_ids)
        if token_ids and self.closes and not self.state.is_complete and self.look_at <= after + 1:
            self.closes = self._fits(after, most)
        return token_ids

    def close(self, most: int) -> list[int] | None:
        """An end of at most `most` tokens, for a sequence that ends with it; None: there is none. Empty: the
        answer is whole as it is."""
        if not self.closes or self.state.failed:
            return None
        return [] if self.state.is_complete else self.state.closing(most)

    def _fits(self, emitted: int, most: int) -> bool:
        """Whether an end fits into what is left after `emitted` tokens; notes when to look again."""
        end = self.state.closing(most - emitted)
        if end is None:
            return False
        # A complete value ends with the end token, so that no end is empty.
        self.end, self.end_at = end or [self.end_token], emitted
        self.look_at = emitted + max(1, (most - emitted - len(end)) // (self.growth_tokens + 1))
        return True
