"""Checks that a request's signature is valid, current and not used before. Pure: times are wall clock."""

from __future__ import annotations

import heapq

from engine.vllm_plugin.protocol import ContractClaims
from engine.vllm_plugin.signature import SKEW_S, SignatureRefused, verify

MAX_REMEMBERED = 100_000


class SeenOnce:
    """Says whether a signed text comes for the first time.

    Texts are remembered for `SKEW_S`, their validity. Of too many the first signed are forgotten, and what is
    not younger than anything forgotten is refused: forgetting never makes a signature valid twice, also where
    the clock was set forward and back.
    """

    def __init__(self, *, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._seen: set[str] = set()
        self._by_time: list[tuple[float, str]] = []
        """A heap of the same: when each was signed, and its name."""
        self._floor_s = float("-inf")

    def is_first(self, name: str, issued_at_s: float, now_s: float) -> bool:
        """Notes `name`, which was signed at `issued_at_s`; False: it was used before, or may have been."""
        if issued_at_s <= self._floor_s or name in self._seen:
            return False
        self._seen.add(name)
        heapq.heappush(self._by_time, (issued_at_s, name))
        while self._by_time and (self._by_time[0][0] < now_s - SKEW_S or len(self._seen) > self._most):
            self._floor_s, oldest = heapq.heappop(self._by_time)
            self._seen.remove(oldest)
        return True

    def __len__(self) -> int:
        return len(self._seen)


class NotAsked(Exception):
    """There is no key, and a request has no signature: nothing is wrong with it."""


class ClaimsCheck:
    """Checks the signatures of requests with one key, and remembers those that were used."""

    def __init__(self, key: bytes | None, life: str) -> None:
        """`key` None: no signature is valid. `life`: of this server."""
        self._key = key
        self._life = life
        self._seen = SeenOnce()

    def verified(self, signed: object, now_s: float) -> ContractClaims:
        """The claims. Raises `NotAsked`, or `SignatureRefused` (also `missing`, `server`, `replayed`)."""
        if signed is None:
            if self._key is None:
                raise NotAsked
            raise SignatureRefused("missing", "it has no signature")
        if self._key is None:
            raise SignatureRefused("foreign", "it is signed, and FAIRGATE_VLLM_KEY_FILE is not set")
        claims = verify(signed, self._key, now_s)
        if claims.life not in ("", self._life):
            raise SignatureRefused("server", "signed for another server, or before this one began")
        # By what was signed, not by how it is written: base64 has more than one spelling of some MACs.
        if not self._seen.is_first(f"{claims.gateway_id}/{claims.sequence_id}", claims.issued_at_s, now_s):
            raise SignatureRefused(
                "replayed", f"the signature of sequence {claims.sequence_id} was used before"
            )
        return claims
