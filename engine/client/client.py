"""`EngineClient`: a gateway's connection to one engine, on one asyncio loop, without torch.

It reconnects after a loss, with a new socket and session each time. The engine gets credit for no more tokens
than a stream has room for: credit-based flow control (Kung, Blackwell, Chapman, SIGCOMM 1994), with leases as
the credit.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec
import zmq

from engine import messages
from engine.client.keys import GATEWAY_FILE, GatewayKeys
from engine.client.link_speed import LinkSpeed
from engine.client.liveness import LivenessThread
from engine.client.stream import (
    MAX_BUFFERED_DELTAS,
    EngineLost,
    EngineRefused,
    EngineStream,
    EngineUnavailable,
    SlowReader,
    SubmitRefused,
)
from engine.client.zmq_link import RECEIVE_QUEUE_MESSAGES, Link
from engine.messages import (
    HEARTBEAT_S,
    PATIENCE_S,
    Delta,
    Inventory,
    Ready,
    SequenceState,
    Snapshot,
    Submit,
    TenantShare,
)

__all__ = [
    "EngineClient",
    "EngineLost",
    "EngineRefused",
    "EngineStream",
    "EngineUnavailable",
    "SlowReader",
    "SubmitRefused",
]

CONNECT_EVERY_S = 0.05
REFUSED_RETRY_S = 5.0
SUPERSEDED_FIRST_S = 1.0
SUPERSEDED_MOST_S = 30.0
"""Longest pause between attempts of a client whose gateway id another process has; doubled each time."""
STOOD_STILL_S = 4 * HEARTBEAT_S
"""A loop that turned so late stood still itself: what the engine sent meanwhile may still arrive."""
QUIET_S = 2.0
"""Time without a delta after which a stream is looked up in the engine's inventory, again and again."""
MOST_MISSED = 2
"""Inventories in a row that lack a sequence: it is lost."""
ANSWER_S = 30.0
MAX_PENDING_ACKNOWLEDGEMENTS = 100_000

log = logging.getLogger("fairgate.engine.client")
Answer = TypeVar("Answer")
OptionValue = str | int | float


class CreditedStream(EngineStream):
    """A stream that reports reads, and the credit that follows from them."""

    def __init__(
        self,
        sequence_id: str,
        on_read: Callable[[CreditedStream], None],
        *,
        on_overflow: Callable[[str], None],
        received_tokens: int,
        max_buffered_deltas: int,
        covered_tokens: int,
    ) -> None:
        super().__init__(
            sequence_id,
            on_overflow=on_overflow,
            received_tokens=received_tokens,
            max_buffered_deltas=max_buffered_deltas,
        )
        self.covered_tokens = covered_tokens
        self.credit_tokens = 0
        """The lease as sent to the engine."""
        self.is_wanted = True
        """False: cancelled, so reads make no room for more."""
        self._read_tokens = received_tokens
        # Some room is left for deltas without a token.
        self._room_tokens = max(1, max_buffered_deltas * 3 // 4)
        self._on_read = on_read
        self.seen_s = 0.0
        """When it was last known to be at the engine."""
        self.missed = 0
        """Inventories in a row that lacked it."""

    @property
    def next_credit_tokens(self) -> int:
        """The lease that the buffer has room for."""
        if not self.is_wanted:
            return self.credit_tokens
        return min(self.covered_tokens, self._read_tokens + self._room_tokens)

    @property
    def is_credit_due(self) -> bool:
        """Whether a message is due: half the room is free, or it is the last credit."""
        free = self.next_credit_tokens - self.credit_tokens
        return free > 0 and (2 * free >= self._room_tokens or self.next_credit_tokens == self.covered_tokens)

    async def __anext__(self) -> Delta:
        delta = await super().__anext__()
        self._read_tokens += len(delta.token_ids)
        self._on_read(self)
        return delta


class EngineClient:
    """A gateway's connection to one engine. Use it from one asyncio loop only."""

    def __init__(
        self,
        address: str,
        gateway_id: str,
        *,
        keys: GatewayKeys | None = None,
        silence_s: float = PATIENCE_S,
        max_buffered_deltas: int = MAX_BUFFERED_DELTAS,
        on_service: Callable[[dict[str, TenantShare]], None] | None = None,
        on_ready: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """`gateway_id`: at most 128 characters, of one live gateway process at a time. `keys`: for an engine
        at a tcp address. An engine silent for `silence_s` counts as dead; it sends nothing during a step."""
        self.address = address
        self.gateway_id = gateway_id
        self.on_service = on_service
        """Called with the service of each step that ran sequences of this gateway, before its deltas."""
        self.on_ready = on_ready
        self.on_lost = on_lost
        self.ready: Ready | None = None
        """The engine's last announcement, kept after a loss. None before the first contact."""
        self.snapshot: Snapshot | None = None
        self.refusal: EngineRefused | None = None
        self._keys = keys
        self._silence_s = silence_s
        self._max_buffered_deltas = max_buffered_deltas
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._link: Link | None = None
        self._liveness: LivenessThread | None = None
        self._superseded = 0
        """Refusals in a row as superseded."""
        self._turned_s = 0.0
        self._looked_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._up = False
        self._changed = asyncio.Event()
        self._heard_s = 0.0
        self._greeted = False
        self._streams: dict[str, CreditedStream] = {}
        self._inventories: deque[asyncio.Future[Inventory]] = deque()
        self._policies: deque[asyncio.Future[str]] = deque()
        self._explanations: deque[asyncio.Future[messages.Explained]] = deque()
        self._wanted_policy: messages.SetPolicy | None = None
        """The last policy requested: sent again to an engine that restarts."""
        self._wanted_knobs = messages.EngineKnobs()
        self._wanted_brakes: messages.SetBrakes | None = None
        self._exports: dict[str, asyncio.Future[SequenceState | None]] = {}
        self.link_speed = LinkSpeed()
        self._acknowledgements: dict[str, bool] = {}
        """Those to be sent with the next connection, and whether their traces are kept."""

    # ------------------------------------------------------------ connection

    @property
    def is_up(self) -> bool:
        return self._up

    @property
    def is_connecting(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the engine or, before any, since connecting began."""
        return asyncio.get_running_loop().time() - self._heard_s

    @property
    def runs(self) -> bool:
        """Some sequence of this gateway is there, or its end was not read yet."""
        return bool(self._streams)

    def open(self) -> None:
        """Begins to connect, and goes on trying."""
        if self._task is None:
            self._context = zmq.Context()
            self._open_link()
            self._liveness = LivenessThread(self._context, self.address, self._keys)
            self._task = asyncio.create_task(self._keep_alive(), name=f"engine client {self.address}")

    async def connect(self, timeout_s: float = 30.0) -> Ready:
        """Waits until the engine serves. Raises `EngineUnavailable` (attempts go on) and `EngineRefused`."""
        self.open()
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._up and self.ready is not None):
                    if self.refusal is not None:
                        raise self.refusal
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailable(f"no engine serves at {self.address} (waited {timeout_s:g} s)") from None
        return self.ready

    async def close(self) -> None:
        """Disconnects. The engine cancels running sequences and keeps unacknowledged outcomes."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        if self._liveness is not None:
            self._liveness.close()
        self._end_all("the client was closed")
        if self._context is not None:
            self._context.term()
            self._context = None
        self._task = self._link = self._liveness = None

    def mark_lost(self, reason: str = "the engine died") -> None:
        """Treats the engine as dead immediately; for a supervisor that watches its process."""
        if self._link is not None and self._link.is_open:
            self._link.read(RECEIVE_QUEUE_MESSAGES)  # what it sent before it died still counts
            self._lose(reason)

    # -------------------------------------------------------------- commands

    def submit(self, submit: Submit) -> EngineStream:
        """Starts a sequence. Raises `EngineUnavailable`, and `ValueError` for an id that runs already."""
        stream = self._stream(submit, 0)
        return self._start(stream, _with_credit(submit, stream))

    def import_(self, state: SequenceState) -> EngineStream:
        """Goes on with an exported sequence; raises as `submit` does."""
        stream = self._stream(state.submit, len(state.output_token_ids))
        state = msgspec.structs.replace(state, submit=_with_credit(state.submit, stream))
        return self._start(stream, messages.Import(state))

    def cancel(self, sequence_id: str, cause: str = "cancelled") -> None:
        """Stops a sequence within one step; its outcome still comes. Harmless if it or the engine is gone."""
        if sequence_id in self._streams:
            self._streams[sequence_id].is_wanted = False
        if self._up:
            self._post(messages.Cancel(sequence_id, cause))

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None = None) -> None:
        """Raises a sequence's lease, of emitted tokens and of device time. Raises `EngineUnavailable`."""
        stream = self._streams.get(sequence_id)
        if stream is None:
            self._send(messages.TopUp(sequence_id, lease_tokens, lease_gpu_us))
            return
        stream.covered_tokens = max(stream.covered_tokens, lease_tokens)
        credit_tokens = stream.next_credit_tokens
        self._send(messages.TopUp(sequence_id, credit_tokens, lease_gpu_us))
        stream.credit_tokens = credit_tokens

    def acknowledge(self, sequence_ids: Iterable[str], *, is_traced: bool = False) -> None:
        """Acknowledges settled outcomes, once connected. Idempotent. `is_traced`: their traces are kept."""
        ids = list(sequence_ids)
        if ids and not (self._up and self._post(messages.Acknowledge(ids, is_traced))):
            self._acknowledgements.update(dict.fromkeys(ids, is_traced))
            while len(self._acknowledgements) > MAX_PENDING_ACKNOWLEDGEMENTS:
                # Dropping one only costs a repeated, idempotent settlement after `collect`.
                del self._acknowledgements[next(iter(self._acknowledgements))]

    async def collect(self, *, adopt: bool = False) -> Inventory:
        """Sequences and outcomes to settle; with `adopt`, also lost gateways'. Raises `EngineUnavailable`."""
        self._send(messages.Collect(adopt))
        return await self._answer(self._inventories)

    async def set_policy(self, name: str, options: Mapping[str, OptionValue] | None = None) -> None:
        """Sets the policy from the next step on; options not named are the defaults. Raises `ValueError` with
        the engine's words, and `EngineUnavailable`: it is then sent when the engine is back."""
        earlier, wanted = self._wanted_policy, messages.SetPolicy(name, dict(options or {}))
        self._wanted_policy = wanted
        self._send(wanted)
        error = await self._answer(self._policies)
        if error:
            if self._wanted_policy is wanted:
                self._wanted_policy = earlier
            raise ValueError(error)

    def set_knobs(self, knobs: messages.EngineKnobs) -> None:
        """Turns the engine's knobs from the next step on; sent again to an engine that comes back."""
        self._wanted_knobs = knobs
        if self._up:
            self._post(messages.SetKnobs(knobs))

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Sets what tiers, by rank, may hold from the next step on; sent again to a restarted engine."""
        self._wanted_brakes = messages.SetBrakes(dict(shares))
        if self._up:
            self._post(self._wanted_brakes)

    async def explain(self, steps: int = 0) -> messages.Explained:
        """Policy in force, last decisions and tokens of `steps` steps. Raises `EngineUnavailable`."""
        self._send(messages.Explain(steps))
        return await self._answer(self._explanations)

    async def export(self, sequence_id: str, *, with_kv: bool = True) -> SequenceState | None:
        """Takes a sequence out of the engine (None: it does not hold it); its stream ends without an outcome.
        Raises `EngineUnavailable`, and `ValueError` while another export of it runs."""
        if sequence_id in self._exports:
            raise ValueError(f"sequence {sequence_id} is being exported already")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._send(messages.Export(sequence_id, without_kv=not with_kv))
        future: asyncio.Future[SequenceState | None] = loop.create_future()
        self._exports[sequence_id] = future
        try:
            async with asyncio.timeout(ANSWER_S):
                state = await future
            if state is not None:
                self.link_speed.note(sum(map(len, state.kv)), loop.time() - began_s)
            return state
        except TimeoutError:
            raise EngineUnavailable(f"the engine did not answer within {ANSWER_S:g} s") from None
        finally:
            self._exports.pop(sequence_id, None)

    def _stream(self, submit: Submit, received_tokens: int) -> CreditedStream:
        return CreditedStream(
            submit.sequence_id,
            self._give_credit,
            on_overflow=self._cut_slow_reader,
            received_tokens=received_tokens,
            max_buffered_deltas=self._max_buffered_deltas,
            covered_tokens=submit.lease_tokens,
        )

    def _start(self, stream: CreditedStream, command: messages.Tagged) -> EngineStream:
        if stream.sequence_id in self._streams:
            raise ValueError(f"sequence {stream.sequence_id} runs already")
        self._send(command)
        stream.credit_tokens = stream.next_credit_tokens
        stream.seen_s = asyncio.get_running_loop().time()
        self._streams[stream.sequence_id] = stream
        return stream

    def _give_credit(self, stream: CreditedStream) -> None:
        """Sends due credit; what cannot be sent now is sent with the next heartbeat."""
        if stream.is_credit_due and self._up and self._streams.get(stream.sequence_id) is stream:
            credit_tokens = stream.next_credit_tokens
            if self._post(messages.TopUp(stream.sequence_id, credit_tokens)):
                stream.credit_tokens = credit_tokens

    def _cut_slow_reader(self, sequence_id: str) -> None:
        log.warning("sequence %s: its reader is too slow, it is cancelled", sequence_id)
        self.cancel(sequence_id)

    async def _answer(self, queue: deque[asyncio.Future[Answer]]) -> Answer:
        # Answers come in the order of the requests, so an abandoned request keeps its place.
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        queue.append(future)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await future
        except TimeoutError:
            raise EngineUnavailable(f"the engine did not answer within {ANSWER_S:g} s") from None

    def _send(self, command: messages.Tagged) -> None:
        if self.refusal is not None:
            raise self.refusal
        if not self._up:
            raise EngineUnavailable(f"no engine serves at {self.address}")
        if not self._post(command):
            raise EngineUnavailable(f"the engine at {self.address} does not take more commands now")

    def _post(self, command: messages.Tagged) -> bool:
        return self._link is not None and self._link.is_open and self._link.send(messages.encode(command))

    # ---------------------------------------------------------------- events

    def _receive(self, payload: bytes) -> None:
        try:
            event = messages.decode_event(payload)
        except msgspec.DecodeError as error:
            log.warning("malformed message from the engine at %s: %s", self.address, error)
            return
        self._heard_s = asyncio.get_running_loop().time()
        if isinstance(event, messages.Ready):
            self._on_ready(event)
        elif isinstance(event, messages.Refused):
            self._on_refused(event)
        elif not self._up:
            return
        elif isinstance(event, messages.Step):
            self._on_step(event)
        elif isinstance(event, messages.Snapshot):
            self.snapshot = event
        elif isinstance(event, messages.Inventory):
            _resolve(self._inventories, event)
        elif isinstance(event, messages.PolicySet):
            _resolve(self._policies, event.error)
        elif isinstance(event, messages.Explained):
            _resolve(self._explanations, event)
        else:
            self._on_exported(event)

    def _on_ready(self, ready: Ready) -> None:
        if self._up:
            # Only an engine that does not know this session sends `Ready` again.
            self._lose(
                "the engine was restarted" if self._is_new(ready) else "the engine gave this gateway up"
            )
            return
        self.ready = ready
        self.refusal = None
        self._superseded = 0
        self._up = True
        if self._liveness is not None:
            self._liveness.session = ready.session
        self._changed.set()
        log.info("engine %s at %s is ready (pid %d)", ready.engine_id, self.address, ready.pid)
        if self._wanted_policy is not None:
            answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            answered.add_done_callback(self._log_refused_policy)
            self._policies.append(answered)
            self._post(self._wanted_policy)
        if self._wanted_knobs != messages.EngineKnobs():
            self._post(messages.SetKnobs(self._wanted_knobs))
        if self._wanted_brakes is not None:
            self._post(self._wanted_brakes)
        pending, self._acknowledgements = self._acknowledgements, {}
        for is_traced in (False, True):
            self.acknowledge(
                [sequence_id for sequence_id in pending if pending[sequence_id] is is_traced],
                is_traced=is_traced,
            )
        self._call(self.on_ready)

    def _log_refused_policy(self, answered: asyncio.Future[str]) -> None:
        if not answered.cancelled() and answered.exception() is None and answered.result():
            log.error("engine at %s refuses its policy: %s", self.address, answered.result())

    def _is_new(self, ready: Ready) -> bool:
        return self.ready is None or self.ready.pid != ready.pid

    def _on_refused(self, refused: messages.Refused) -> None:
        if refused.sequence_id:
            stream = self._streams.pop(refused.sequence_id, None)
            if stream is not None:
                stream.end(SubmitRefused(refused.code, refused.message))
            return
        if refused.code == "no_session":
            if self._up:
                self._lose("the engine gave this gateway up")
            return
        self._refuse(refused.code, refused.message)

    def _on_keys_refused(self) -> None:
        self._refuse(
            "keys_refused",
            f"the engine at {self.address} has other keys than this gateway: copy {GATEWAY_FILE} from the"
            " engine's data directory to the gateway's, and start the gateway again",
        )

    def _refuse(self, code: str, message: str) -> None:
        if self.refusal is None or self.refusal.code != code:
            log.error("engine at %s refuses gateway %s: %s", self.address, self.gateway_id, message)
        self.refusal = EngineRefused(code, message)
        self._lose(message, reconnect=False)

    def _on_step(self, step: messages.Step) -> None:
        if step.service and self.on_service is not None:
            service = self.on_service
            self._call(lambda: service(step.service))
        for delta in step.deltas:
            stream = self._streams.get(delta.sequence_id)
            if stream is None:
                log.debug("delta of sequence %s, which has no reader", delta.sequence_id)
                continue
            stream.seen_s, stream.missed = self._heard_s, 0
            if not stream.push(delta):
                self._lose(
                    f"messages were lost (sequence {delta.sequence_id}, token {stream.received_tokens})"
                )
                return
            if delta.outcome is not None:
                del self._streams[delta.sequence_id]

    def _on_broken(self) -> None:
        """Handles a broken connection; before the first answer the link reconnects by itself."""
        if self._up:
            self._lose("the engine died, or its connection broke")

    def _on_exported(self, exported: messages.Exported) -> None:
        if exported.state is not None:
            stream = self._streams.pop(exported.sequence_id, None)
            if stream is not None:
                stream.end(None)
        future = self._exports.get(exported.sequence_id)
        if future is not None and not future.done():
            future.set_result(exported.state)

    # ----------------------------------------------------- loss and recovery

    def _lose(self, reason: str, *, reconnect: bool = True) -> None:
        was_up, self._up = self._up, False
        self.snapshot = None
        if self._liveness is not None:
            self._liveness.session = ""
        # The engine knows a superseded connection: it takes it back once the other process has gone.
        is_superseded = self.refusal is not None and self.refusal.code == "superseded"
        if self._link is not None and not (is_superseded and not reconnect):
            self._link.close()
        if reconnect:
            self._open_link()
        self._end_all(reason)
        self._changed.set()
        if was_up:
            log.warning("engine at %s lost: %s", self.address, reason)
            self._call(self.on_lost)

    def _end_all(self, reason: str) -> None:
        self._up = False
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lose(reason)
        queues: tuple[deque[asyncio.Future[Any]], ...] = (
            self._inventories,
            self._policies,
            self._explanations,
        )
        waiting = [future for queue in queues for future in queue] + list(self._exports.values())
        for queue in queues:
            queue.clear()
        self._exports.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
                future.exception()  # retrieved here: its waiter may be gone

    def _open_link(self) -> None:
        assert self._context is not None
        identity = f"{self.gateway_id[:200]}/{uuid.uuid4().hex}".encode()[-255:]
        self._link = Link(
            self._context,
            self.address,
            identity,
            self._receive,
            self._on_broken,
            keys=self._keys,
            on_keys_refused=self._on_keys_refused,
        )
        self._heard_s = asyncio.get_running_loop().time()
        self._greeted = False

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        self._turned_s = loop.time()
        while True:
            if self.refusal is not None and not self._up:
                await self._come_back(self.refusal)
            assert self._link is not None
            assert self._liveness is not None
            self._liveness.turned()
            self._link.read()
            if loop.time() - self._turned_s > STOOD_STILL_S:
                self._heard_s = loop.time()
            self._turned_s = loop.time()
            if self._up and self.silent_s > self._silence_s:
                self._lose(f"the engine was silent for {self._silence_s:g} s")
            self._look_for_streams(loop.time())
            self._greeted = self._post(messages.Hello(self.gateway_id)) or self._greeted
            for stream in list(self._streams.values()):
                self._give_credit(stream)
            await asyncio.sleep(HEARTBEAT_S if self._greeted else CONNECT_EVERY_S)

    async def _come_back(self, refusal: EngineRefused) -> None:
        """Waits before retrying; a superseded link is kept, as a new one would end the other's sequences."""
        if refusal.code == "superseded":
            self._superseded += 1
            wait_s = min(SUPERSEDED_MOST_S, SUPERSEDED_FIRST_S * 2.0 ** min(self._superseded - 1, 10))
        else:
            wait_s = REFUSED_RETRY_S
        until_s = asyncio.get_running_loop().time() + wait_s
        while (left_s := until_s - asyncio.get_running_loop().time()) > 0:
            if self._liveness is not None:
                self._liveness.turned()
            await asyncio.sleep(min(HEARTBEAT_S, left_s))
        self._turned_s = asyncio.get_running_loop().time()
        if refusal.code != "superseded":
            self._open_link()
            self.refusal = None

    def _look_for_streams(self, now_s: float) -> None:
        """Asks for an inventory when a stream was quiet for long: a message about it may be lost."""
        quiet = [stream for stream in self._streams.values() if now_s - stream.seen_s >= QUIET_S]
        if not self._up or not quiet or now_s - self._looked_s < QUIET_S:
            return
        if self._post(messages.Collect()):
            self._looked_s = now_s
            answered: asyncio.Future[Inventory] = asyncio.get_running_loop().create_future()
            answered.add_done_callback(lambda future: self._compare(quiet, future))
            self._inventories.append(answered)

    def _compare(self, quiet: list[CreditedStream], answered: asyncio.Future[Inventory]) -> None:
        """Ends the streams of sequences that the engine no longer runs: their last delta was lost."""
        if answered.cancelled() or answered.exception() is not None:
            return
        known = {sequence.sequence_id for sequence in answered.result().running}
        for stream in quiet:
            if self._streams.get(stream.sequence_id) is not stream:
                continue
            if stream.sequence_id in known:
                stream.seen_s, stream.missed = self._heard_s, 0
                continue
            stream.missed += 1
            if stream.missed >= MOST_MISSED:
                del self._streams[stream.sequence_id]
                log.error("sequence %s is missing in %d inventories", stream.sequence_id, stream.missed)
                stream.lose("the engine does not have it")

    def _call(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            try:
                callback()
            except Exception:
                log.exception("a listener of the engine client failed")


def _with_credit(submit: Submit, stream: CreditedStream) -> Submit:
    return msgspec.structs.replace(submit, lease_tokens=stream.next_credit_tokens)


def _resolve(queue: deque[asyncio.Future[Answer]], answer: Answer) -> None:
    if queue:
        future = queue.popleft()
        if not future.done():
            future.set_result(answer)
