"""Whether a request's signature is good, for the first time and now. Pure: times are of the wall clock."""

from __future__ import annotations

from engine.vllm_plugin.channel.replay import SeenOnce
from engine.vllm_plugin.protocol import ContractClaims
from engine.vllm_plugin.signature import SignatureRefused, verify


class NotAsked(Exception):
    """There is no key, and a request has no signature: nothing is wrong with it."""


class ClaimsCheck:
    """Checks the signatures of requests with one key, and remembers those that were used."""

    def __init__(self, key: bytes | None, life: str) -> None:
        """`key` None: no signature is good. `life`: of this server."""
        self._key = key
        self._life = life
        self._seen = SeenOnce()

    def verified(self, signed: object, now_s: float) -> ContractClaims:
        """The claims of `signed`. Raises `NotAsked`, and `SignatureRefused` with the codes of `verify` and
        `missing`, `server` and `replayed`."""
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
