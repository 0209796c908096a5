"""Configuration of another server."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.upstream.health.breaker import BreakerRule
from gateway.upstream.openai.request import PriorityStyle, UsageWish

TOKENS_PER_PAUSE = 64
"""Tokens of a whole answer that may take as long as one pause of a stream."""
WHOLE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of a server."""

    connect_s: float = 5.0
    first_byte_s: float = 120.0
    """From sending the request to the first byte of the answer: its queue and the prefill."""
    between_s: float = 60.0
    """From one piece of the answer to the next."""
    probe_s: float = 5.0

    def whole_s(self, tokens: int) -> float:
        """From sending the request to the first byte of a whole answer: the first byte comes with the end of
        at most `tokens`."""
        return self.first_byte_s + self.between_s * -(-tokens // TOKENS_PER_PAUSE)


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """One server of the settings."""

    name: str
    """Unique among all replicas of this gateway."""
    url: str
    model: str
    """The server's name of the model."""
    api_key: str = field(default="", repr=False)
    max_concurrent: int = 32
    context_tokens: int = 0
    """0: as the server announces."""
    priority: PriorityStyle = PriorityStyle.NONE
    usage: UsageWish = UsageWish.END
    whole_tokens: int = WHOLE_TOKENS
    """An answer that is not read as a stream is asked for whole when it has at most this many tokens and all
    of them are covered. A longer one is streamed to the gateway all the same: its progress is known
    meanwhile, and a server that hangs is noticed. 0: every answer is streamed to the gateway."""
    health_path: str = ""
    """Probed instead of the list of models, for servers whose list does not name what they serve."""
    metrics_path: str = ""
    """Path of its Prometheus page; empty: it is not read."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    breaker: BreakerRule = field(default_factory=BreakerRule)
