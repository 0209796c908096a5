"""Finds out what a server can do, by a request of one token for each capability.

At start, when the server comes back, periodically, and when it refuses what it was assumed to take. Never
while requests wait for it: what is unknown is refused as such. No tenant is charged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from gateway.upstream.capabilities import Capabilities, Capability, Endpoint
from gateway.upstream.http.client import HttpClient, HttpFailed
from gateway.upstream.openai.capability_trial import (
    Trial,
    TrialResult,
    result_of,
    text_trials,
    trials,
    vector_trials,
)
from gateway.upstream.openai.config import AUTO, OpenAIServer
from gateway.upstream.openai.response import Meaning, meaning, without_secrets
from gateway.upstream.openai.server_kinds import KIND_FIELDS, ServerKind

TRY_EVERY_S = 300.0
"""A server may be started anew, with other options, between two looks at its list of models."""
AGAIN_AFTER_S = 5.0
"""Least pause after a refusal or while something is untried; doubles up to `TRY_EVERY_S` while nothing new
shows, so that repeated refusals cost the server no more."""
UNTRIED_AFTER_S = 60.0
"""Longest pause while something is untried: clients that need it are asked to retry."""
MOST_TRIAL_S = 30.0
VECTORS = frozenset({Capability.EMBEDDINGS, Capability.RERANK})
TRIED = frozenset(Capability) - {Capability.TEXT}

log = logging.getLogger("fairgate.gateway.upstream")


class CapabilityProbe:
    """One server. Use from one event loop; `found` may be read from threads."""

    def __init__(
        self,
        server: OpenAIServer,
        client: HttpClient,
        *,
        is_up: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        self._server = server
        self._client = client
        self._is_up = is_up
        self._on_change = on_change
        self._wanted = asyncio.Event()
        self._is_doubted = False
        self._tried_s = -TRY_EVERY_S
        self.pause_s = AGAIN_AFTER_S
        """Until it is tried again because of a refusal, or because something is untried."""
        self._kind = server.kind
        self._plain: Trial | None = None
        """The simplest request that it answers."""
        self.reasons: dict[Capability, str] = {}
        """In its own words, in a line."""
        self.found = self._set_by_operator() if self.is_set else self._with(Capability.TEXT, untried=TRIED)
        """Until tried, a server is assumed to generate plain text."""

    @property
    def is_set(self) -> bool:
        return self._server.capabilities != AUTO

    def is_of_kind(self, kind: ServerKind) -> None:
        """Sets the kind by its list of models."""
        if self._server.kind is ServerKind.AUTO and kind is not self._kind:
            self._kind = kind
            if self.is_set:
                self._now(self._set_by_operator())
            else:
                before = self.found
                self._now(self._with(*before.words, untried=before.untried, refused=before.refused))
                self.want()

    def want(self) -> None:
        """Requests a trial now: it came back."""
        self._wanted.set()

    def doubt(self) -> None:
        """Requests a trial soon: it refused what it was assumed to take."""
        if not self._is_doubted and not self.is_set:
            self._is_doubted = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._tried_s + self.pause_s), self.want)

    async def keep_trying(self) -> None:
        while not self.is_set:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.pause_s if self.found.untried else TRY_EVERY_S):
                    await self._wanted.wait()
            self._wanted.clear()
            if self._is_up():
                await self.try_all()

    async def try_all(self) -> None:
        """Tries everything once, in turn. Failures other than refusals change nothing."""
        if self.is_set:
            return
        self._is_doubted, self._tried_s = False, asyncio.get_running_loop().time()
        model, kind = self._server.model, self._kind
        chat, text = text_trials(model)
        words, untried = set(self.found.words), set(self.found.untried)
        reasons: dict[Capability, str] = {}

        def note(word: Capability, result: TrialResult, reason: str) -> None:
            if result is TrialResult.UNKNOWN:
                if word in self.reasons:
                    reasons[word] = self.reasons[word]
                return
            (words.add if result is TrialResult.CAN else words.discard)(word)
            untried.discard(word)
            if result is not TrialResult.CAN:
                reasons[word] = reason

        result, reason = await self._tried(chat, None)
        is_chat, refused = result is TrialResult.CAN, self.found.refused
        if result is not TrialResult.UNKNOWN:
            of_text, _ = await self._tried(text, chat if is_chat else None)
            if not is_chat:
                result, refused = of_text, frozenset({Endpoint.CHAT})
            elif of_text is not TrialResult.UNKNOWN:
                refused = frozenset() if of_text is TrialResult.CAN else frozenset({Endpoint.TEXT})
        note(Capability.TEXT, result, reason)
        if result is TrialResult.UNKNOWN:
            return
        if result is not TrialResult.CAN:
            refused = frozenset()
        plan, plain = vector_trials(model), None
        if result is TrialResult.CAN:
            plan += trials(model, kind, is_chat=is_chat)
            plain = chat if is_chat else text
        for trial in plan:
            note(trial.word, *await self._tried(trial, plain))
        if words.isdisjoint(VECTORS):
            words.add(Capability.TEXT)  # what else would it be for: its own refusal says more
        gone = TRIED.difference(trial.word for trial in plan)
        self.reasons, before = reasons, self.found
        self._now(self._with(*words - gone, untried=frozenset(untried - gone), refused=refused))
        longest_s = UNTRIED_AFTER_S if self.found.untried else TRY_EVERY_S
        self.pause_s = min(longest_s, 2 * self.pause_s) if self.found.does_as(before) else AGAIN_AFTER_S

    async def one_token(self) -> tuple[int, str]:
        """Requests one token or vector. Status (0: none), and why it shows no life; empty: it does."""
        found, model = self.found, self._server.model
        least = [
            trial
            for trial in (*text_trials(model), *vector_trials(model))
            if trial.word in found.words | found.untried
        ]
        status, reason, is_alive = 0, "", False
        for trial in sorted(least, key=lambda trial: trial != self._plain):
            try:
                status, body = await self._client.post(trial.path, trial.body, self._timeout_s)
            except HttpFailed as error:
                return 0, str(error)
            result, reason = result_of(status, body)
            if result is TrialResult.CAN:
                self._plain = trial
                return status, ""
            is_alive |= meaning(status) in (Meaning.REFUSED, Meaning.BUSY)
            if result is not TrialResult.CANNOT:
                break
        return status, "" if is_alive else without_secrets(reason, self._server.api_key)

    async def _tried(self, trial: Trial, plain: Trial | None) -> tuple[TrialResult, str]:
        """An error of the server's own counts as a refusal if it still answers `plain`."""
        result, reason = await self._sent(trial)
        if result is not TrialResult.FAILED:
            return result, reason
        if plain is not None and (await self._sent(plain))[0] is TrialResult.CAN:
            return TrialResult.CANNOT, reason
        return TrialResult.UNKNOWN, reason

    async def _sent(self, trial: Trial) -> tuple[TrialResult, str]:
        try:
            status, body = await self._client.post(trial.path, trial.body, self._timeout_s)
        except HttpFailed as error:
            return TrialResult.UNKNOWN, str(error)
        result, reason = result_of(status, body)
        return result, without_secrets(reason, self._server.api_key)

    @property
    def _timeout_s(self) -> float:
        return min(self._server.first_byte_s, MOST_TRIAL_S)

    def _set_by_operator(self) -> Capabilities:
        words = {Capability(word) for word in self._server.capabilities}
        if not words or words - VECTORS:
            words.add(Capability.TEXT)  # unless it is only there for something else
        if Capability.TOOLS in words:
            words.add(Capability.FORCED_TOOLS)
        return self._with(*words)

    def _with(
        self, *words: str, untried: frozenset[str] = frozenset(), refused: frozenset[str] = frozenset()
    ) -> Capabilities:
        fields = KIND_FIELDS.get(self._kind, frozenset()) if Capability.EXTRA_FIELDS in words else frozenset()
        kind = ServerKind.OTHER if self._kind is ServerKind.AUTO else self._kind
        reasons = {word.value: reason for word, reason in self.reasons.items()}
        return Capabilities(
            frozenset(words),
            fields.union(self._server.fields),
            untried,
            kind,
            refused=refused,
            reasons=reasons,
        )

    def _now(self, found: Capabilities) -> None:
        before, self.found = self.found, found
        if found.does_as(before):
            return
        for word in sorted(before.words - found.words):
            reason = self.reasons.get(Capability(word), "")
            log.warning("upstream %s cannot do %s any more: %s", self._server.name, word, reason)
        for endpoint in sorted(found.refused - before.refused):
            log.warning("upstream %s refuses what needs %s", self._server.name, endpoint)
        if added := found.words - before.words - {Capability.TEXT}:
            log.info("upstream %s can do %s", self._server.name, ", ".join(sorted(added)))
        self._on_change()


def described(probe: CapabilityProbe) -> Mapping[str, object]:
    found = probe.found
    return {
        "server": found.kind,
        "capabilities": sorted(found.words),
        "cannot": {word.value: probe.reasons[word] for word in sorted(probe.reasons)},
        "untried": sorted(found.untried),
        "fields": sorted(found.fields),
        "capabilities_from": "settings" if probe.is_set else "trials",
    }
