"""Response bodies and stream chunks of both kinds of completion, in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.messages import SequenceOutcome, TokenLogprob
from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.domain.ids import CHAT_ID_PREFIX, TEXT_ID_PREFIX, shown_id
from gateway.domain.tiers import TIER_NAMES
from gateway.errors import ApiError
from gateway.requests.dialects.dialect import KEEP_ALIVE, Choice, encode, encode_line, server_sent
from gateway.requests.run import Begun, Closed, Event, InLine, SequenceEnded, SequenceOutput, Silence
from gateway.upstream.base import ABOUT_PROMPT, CountedOutcome, Part, RequestTask, ServerLogprob

FINISH_REASONS = {"stop": "stop", "length": "length", "budget": "length"}
"""The engine's finish reason to OpenAI's closed set; a budget stop's cause is `fairgate.stop_cause`."""

DONE = b"data: [DONE]\n\n"


def error_event(error: ApiError, account: Account) -> bytes:
    """The end of a stream that failed: SDKs raise an `APIError`. No `[DONE]`: the answer is not complete."""
    value = error.late_payload() | {"fairgate": account.as_json()}
    return server_sent(value, "error")


def response_id(call: Call) -> str:
    return shown_id(call.request_id, CHAT_ID_PREFIX if call.chat else TEXT_ID_PREFIX)


def usage(account: Account) -> dict[str, Any]:
    """`completion_tokens` counts the end-of-sequence token, and reasoning, which few servers tell apart."""
    input_tokens, output_tokens = account.charged.input_tokens, account.charged.output_tokens
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": account.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": min(account.reasoning_tokens, output_tokens)},
    }


def whole_body(call: Call, choices: Sequence[Choice], account: Account) -> dict[str, Any]:
    shown: list[dict[str, Any]] = []
    for choice in choices:
        item: dict[str, Any] = {"index": choice.index}
        if call.chat:
            item["message"] = choice.message()
        else:
            item["text"] = "".join(choice.text)
        item["logprobs"] = _logprobs(call, choice.logprobs, 0)
        item |= _end(call, choice.finish or "", choice.outcome)
        shown.append(item)
    body = {
        "id": response_id(call),
        "object": "chat.completion" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": shown,
        "usage": usage(account),
        "service_tier": TIER_NAMES[call.tier],
        "fairgate": account.as_json(),
    }
    return body | _beside_choices(call, *(choice.outcome for choice in choices))


def _end(call: Call, finish: str, outcome: SequenceOutcome | None) -> dict[str, Any]:
    """The server's own finish reason if it is more precise, and the fields that came with it."""
    reason = FINISH_REASONS.get(finish, "stop")
    if outcome is None:
        return {"finish_reason": reason}
    fields = {} if not isinstance(outcome, CountedOutcome) else outcome.choice_fields
    if call.chat:
        fields = {name: value for name, value in fields.items() if name not in ABOUT_PROMPT}
    return {"finish_reason": outcome.finish_word or reason, **fields}


def _beside_choices(call: Call, *outcomes: SequenceOutcome | None) -> dict[str, Any]:
    """Fields from the server of the first choice about itself and, in a chat, about the prompt."""
    first = next((outcome for outcome in outcomes if isinstance(outcome, CountedOutcome)), None)
    if first is None:
        return {}
    found = {name: first.choice_fields[name] for name in ABOUT_PROMPT if name in first.choice_fields}
    fingerprint = {"system_fingerprint": first.fingerprint} if first.fingerprint else {}
    return fingerprint | (found if call.chat else {})


def _chunk(call: Call, choices: list[dict[str, Any]]) -> dict[str, Any]:
    chunk: dict[str, Any] = {
        "id": response_id(call),
        "object": "chat.completion.chunk" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "service_tier": TIER_NAMES[call.tier],
    }
    if call.include_usage:
        chunk["usage"] = None
    return chunk


def role_chunk(call: Call, index: int) -> dict[str, Any]:
    return _chunk(
        call,
        [
            {
                "index": index,
                "delta": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    )


def text_chunk(
    call: Call, index: int, text: str, logprobs: Sequence[TokenLogprob], characters_before: int
) -> dict[str, Any]:
    item: dict[str, Any] = {"index": index}
    if call.chat:
        item["delta"] = {"content": text}
    else:
        item["text"] = text
    item["logprobs"] = _logprobs(call, logprobs, characters_before)
    item["finish_reason"] = None
    return _chunk(call, [item])


def parts_chunk(call: Call, index: int, part: Part, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    item = {
        "index": index,
        "delta": part,
        "logprobs": _logprobs(call, logprobs, 0),
        "finish_reason": None,
    }
    return _chunk(call, [item])


def finish_chunk(
    call: Call, index: int, finish: str, outcome: SequenceOutcome | None = None
) -> dict[str, Any]:
    item: dict[str, Any] = {"index": index}
    if call.chat:
        item["delta"] = {}
    else:
        item["text"] = ""
    item["logprobs"] = None
    item |= _end(call, finish, outcome)
    return _chunk(call, [item]) | _beside_choices(call, outcome)


def usage_chunk(call: Call, account: Account) -> dict[str, Any]:
    """The stream's last chunk, with `stream_options.include_usage`."""
    return _chunk(call, []) | {"usage": usage(account), "fairgate": account.as_json()}


def _logprobs(call: Call, logprobs: Sequence[TokenLogprob], characters_before: int) -> dict[str, Any] | None:
    if call.sampling.logprobs is None:
        return None
    if not logprobs and call.stream:
        return None
    if not call.chat:
        return _text_logprobs(logprobs, characters_before)
    return _chat_logprobs(logprobs, has_top=call.sampling.logprobs > 0)


def _chat_logprobs(logprobs: Sequence[TokenLogprob], *, has_top: bool) -> dict[str, Any]:
    return {"content": shown_logprobs(logprobs, has_top=has_top), "refusal": None}


def shown_logprobs(logprobs: Sequence[TokenLogprob], *, has_top: bool) -> list[Mapping[str, Any]]:
    """Each token with its log probability, as a chat shows them; `has_top`: with the most likely ones."""
    return [
        item.shown if isinstance(item, ServerLogprob) else _chat_logprob(item, has_top=has_top)
        for item in logprobs
    ]


def _chat_logprob(item: TokenLogprob, *, has_top: bool) -> dict[str, Any]:
    return {
        "token": item.text,
        "logprob": item.logprob,
        "bytes": list(item.text.encode()),
        "top_logprobs": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode())}
            for _, text, logprob in (_top_with_sampled(item) if has_top else ())
        ],
    }


def _top_with_sampled(item: TokenLogprob) -> list[tuple[int, str, float]]:
    """The most likely tokens, then the sampled one if it is not among them."""
    sampled = (item.token_id, item.text, item.logprob)
    is_there = any((token_id, text) == sampled[:2] for token_id, text, _ in item.top)
    return item.top if is_there else [*item.top, sampled]


def _text_logprobs(logprobs: Sequence[TokenLogprob], characters_before: int) -> dict[str, Any]:
    """The legacy shape; offsets count characters. NaN (first token of an echoed prompt) is null."""
    offsets: list[int] = []
    position = characters_before
    for item in logprobs:
        offsets.append(position)
        position += len(item.text)
    return {
        "tokens": [item.text for item in logprobs],
        "token_logprobs": [item.logprob for item in logprobs],
        # Two tokens may read alike (pieces of a character): of these the sampled one is shown.
        "top_logprobs": [
            None
            if math.isnan(item.logprob)
            else {text: logprob for _, text, logprob in item.top} | {item.text: item.logprob}
            for item in logprobs
        ],
        "text_offset": offsets,
    }


# A choice's chunks differ only in their text: its frame is cut once from `text_chunk`.

_PLACE = "\ue000"
"""Placeholder of the text; what follows it in a chunk holds no client's text."""


class TextChunks:
    """Chunks of one request's choices, without log probabilities."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._frames = {0: self._frame(0)}

    def event(self, index: int, text: str) -> bytes:
        """Equal to `server_sent(text_chunk(...))`."""
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frames[index] = self._frame(index)
        return frame[0] + encode_line(text) + frame[1]

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        whole = server_sent(text_chunk(self._call, index, _PLACE, (), 0))
        before, _, after = whole.rpartition(encode(_PLACE))
        return before, after


class ChunkWriter:
    """Turns events into server-sent events. Holds the last choice's end back for the account."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._live = call.sequences
        self._logprob_characters = [0] * call.sequences
        self._text = TextChunks(call)
        self._last: SequenceEnded | None = None
        roles = [role_chunk(call, index) for index in range(call.sequences)] if call.chat else []
        self._roles = b"".join(map(server_sent, roles))

    def write(self, event: Event, refusal: ApiError | None = None) -> bytes:
        """Empty if there is nothing to write yet."""
        call = self._call
        match event:
            case InLine():
                return b""
            case Silence():
                return KEEP_ALIVE
            case Begun():
                return self._roles
            case SequenceOutput(parts=parts) if parts:
                return self._with_parts(event)
            case SequenceOutput(index=index, text=text, logprobs=logprobs) if not logprobs:
                return self._text.event(index, text)
            case SequenceOutput(index=index, text=text, logprobs=logprobs):
                before = self._logprob_characters[index]
                self._logprob_characters[index] += sum(len(item.text) for item in logprobs)
                return server_sent(text_chunk(call, index, text, logprobs, before))
            case SequenceEnded():
                self._live -= 1
                if self._live == 0 and not call.include_usage:
                    self._last = event
                    return b""
                return server_sent(self._finish_chunk(event))
            case Closed(account=account):
                return self._close(account, refusal)

    def _with_parts(self, output: SequenceOutput) -> bytes:
        """A chunk for each part, and one for the text; the first has the log probabilities of all."""
        logprobs, found = output.logprobs, []
        for part in output.parts if self._call.chat else ():
            chunk = parts_chunk(self._call, output.index, part, logprobs)
            found.append(server_sent(chunk))
            logprobs = ()
        if output.text:
            found.append(self.write(SequenceOutput(output.index, output.text, logprobs)))
        return b"".join(found)

    def _finish_chunk(self, ended: SequenceEnded) -> dict[str, Any]:
        return finish_chunk(self._call, ended.index, ended.finish, ended.outcome)

    def _close(self, account: Account, error: ApiError | None) -> bytes:
        if error is not None:
            return error_event(error, account)
        if self._call.include_usage:
            return server_sent(usage_chunk(self._call, account)) + DONE
        assert self._last is not None, "a complete request has a last choice"
        chunk = self._finish_chunk(self._last) | {"fairgate": account.as_json()}
        return server_sent(chunk) + DONE


def _vectors_body(call: Call, vectors: str, account: Account) -> dict[str, Any]:
    """An embedding answer in OpenAI's shape, or a rerank answer in that of vLLM and Jina. `vectors`: JSON."""
    tokens = account.charged.input_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rows = msgspec.Raw(vectors.encode())
    common = {"model": call.model, "usage": usage, "fairgate": account.as_json()}
    if call.task is RequestTask.EMBED:
        return {"object": "list", "data": rows} | common
    return {"id": call.request_id, "results": rows} | common


class Completions:
    """Both kinds of completion; embeddings and rerank, whose answers are whole."""

    def writer(self, call: Call) -> ChunkWriter:
        return ChunkWriter(call)

    def whole(self, call: Call, choices: Sequence[Choice], account: Account) -> dict[str, Any]:
        if call.task is RequestTask.COMPLETE:
            return whole_body(call, choices, account)
        return _vectors_body(call, "".join(choices[0].text), account)

    def refused(self, error: ApiError, request_id: str) -> bytes:
        return error.body()


COMPLETIONS = Completions()
