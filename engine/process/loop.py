"""`EngineLoop`: main loop of the engine process. Synchronous: between two steps nothing else runs.

It never waits for a gateway: messages that one cannot take now are kept, within bounds, and a gateway that
stays behind is lost. A lost gateway's sequences are cancelled before the next step; outcomes stay in the
store until a gateway acknowledges them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine import messages
from engine.client.zmq_link import MAX_MESSAGE_BYTES
from engine.messages import GATEWAY_LOST_S, PATIENCE_S, Delta, Ready, SequenceOutcome
from engine.process.outcomes import OutcomeStore
from engine.process.sessions import GatewaySession, GatewaySessions, HelloRefused
from engine.process.spans import EngineSpans
from engine.scheduling.policy import options_of

if TYPE_CHECKING:
    from engine.core.core import EngineCore
    from engine.core.step_service import ServiceShare

MAX_COMMANDS_PER_TURN = 256
SNAPSHOT_EVERY_S = 0.05
IDLE_SNAPSHOT_EVERY_S = 0.25
"""Also the engine's heartbeat."""
IDLE_AUDIT_S = 0.5
"""Idle time after which the engine audits itself once."""
RETRY_S = 0.01
MAX_BACKLOG_BYTES = 64 * 2**20
SETTLE_S = 1.0
"""How long a stopping engine waits for the acknowledgement of its last outcomes."""
CANCEL_S = 5.0
WARN_EVERY_S = 1.0

log = logging.getLogger("fairgate.engine")


@dataclass(slots=True)
class UnsentMessages:
    """Messages that a session's socket did not take, oldest first."""

    since_s: float
    payloads: deque[bytes] = field(default_factory=deque)
    size_bytes: int = 0


class EngineLoop:
    """The engine's one thread. `socket` is a bound ROUTER with ROUTER_MANDATORY set."""

    def __init__(
        self,
        core: EngineCore,
        socket: zmq.Socket[bytes],
        ready: Ready,
        store: OutcomeStore,
        *,
        orphan_s: float,
        clock: Callable[[], float],
        lost_s: float = GATEWAY_LOST_S,
        backlog_s: float = PATIENCE_S,
        on_tick: Callable[[float], None] | None = None,
        spans: EngineSpans | None = None,
    ) -> None:
        """`lost_s`: silence after which a gateway is lost; `backlog_s`: how long it may leave messages
        unread. `on_tick`: with the time, at each snapshot. `spans` None: none are made."""
        self._core = core
        self._socket = socket
        self._ready = ready
        self._store = store
        self._orphan_s = orphan_s
        self._backlog_s = backlog_s
        self._clock = clock
        self._on_tick = on_tick
        self._spans = spans
        self._lost_s = lost_s
        self._gateways = GatewaySessions(now_s=clock(), lost_s=lost_s)
        self._backlogs: dict[bytes, UnsentMessages] = {}
        self._collects: deque[tuple[GatewaySession, bool]] = deque()
        self._snapshot_s = float("-inf")
        self._changed = True
        self._idle = False
        self._read_s = clock()
        self._unread_s = 0.0
        self._knobs_of: GatewaySession | None = None
        self._unaudited_s: float | None = None
        self._suppressed = 0
        self._warned_s = float("-inf")
        self._drain_until_s: float | None = None
        self._cancelled_s: float | None = None
        self._settle_until_s: float | None = None

    def run(self) -> str:
        """Serves until `stop` or until no gateway was heard for `orphan_s`; returns why it ended. Raises
        `DeviceLost`, and what a broken core raises; all live sequences have then ended as `failed`."""
        try:
            return self._serve()
        except Exception:
            self._fail_all("the engine failed")
            raise

    def _serve(self) -> str:
        while True:
            now_s = self._clock()
            # An idle engine reads at once.
            self._unread_s = 0.0 if self._idle else now_s - self._read_s
            self._read_s = now_s
            if self._read_commands(now_s):
                # Only when nothing is left to read: a long step must not look like silence.
                for session in self._gateways.silent(now_s):
                    self._lose(session, f"unheard for {self._lost_s:g} s")
            self._idle = True
            if self._core.has_work():
                self._step()
            self._answer_collects()
            self._flush(now_s)
            self._report(self._clock())
            self._audit(self._clock())
            why = self._end(self._clock())
            if why:
                return why
            if self._idle:
                self._wait()

    def stop(self, drain_s: float) -> None:
        """Takes no new sequence; ends with the live ones, within `drain_s`. Safe in a signal handler."""
        until_s = self._clock() + drain_s
        self._drain_until_s = until_s if self._drain_until_s is None else min(until_s, self._drain_until_s)

    def _fail_all(self, message: str) -> None:
        """Ends every live sequence as `failed`, with what it had emitted by then: the core is broken."""
        deltas = []
        for live in self._core.running():
            outcome = SequenceOutcome(
                sequence_id=live.sequence_id,
                request_id=live.request_id,
                tenant_id=live.tenant_id,
                finish="failed",
                prompt_tokens=live.prompt_tokens,
                cached_tokens=0,
                computed_tokens=min(live.computed_tokens, live.prompt_tokens),
                emitted_tokens=live.emitted_tokens,
                tier=live.tier,
                message=message,
            )
            deltas.append(Delta(sequence_id=live.sequence_id, outcome=outcome))
        self._deliver(deltas, step=0, duration_s=0.0, service={})

    # -------------------------------------------------------------- commands

    def _read_commands(self, now_s: float) -> bool:
        """Executes received commands, a bounded number; True when nothing is left to read."""
        for _ in range(MAX_COMMANDS_PER_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._changed = True
            try:
                if len(frames) != 2:
                    raise msgspec.DecodeError(f"{len(frames) - 1} frames instead of one")
                command = messages.decode_command(frames[1])
            except msgspec.DecodeError as error:
                self._warn(f"malformed command from {_name(frames[0])}: {error}", now_s)
                continue
            try:
                self._execute(frames[0], command, now_s)
            except Exception:
                log.exception("command %s from %s failed", type(command).__name__, _name(frames[0]))
                self._core.check()  # one bad command is survived, a damaged core is not
                if isinstance(command, messages.Submit):
                    self._refuse(
                        frames[0], command.sequence_id, "failed", "the engine cannot run this sequence"
                    )
        return False

    def _execute(self, identity: bytes, command: messages.Command, now_s: float) -> None:
        if isinstance(command, messages.Hello):
            self._greet(identity, command, now_s)
            return
        if isinstance(command, messages.Alive):
            self._gateways.alive(command.session, now_s)
            return
        session = self._gateways.hear(identity, now_s)
        if session is None:
            self._warn(f"{type(command).__name__} from {_name(identity)}, which has no session", now_s)
            if isinstance(command, messages.Submit):
                self._refuse(
                    identity, command.sequence_id, "no_session", "the engine does not know this gateway"
                )
        elif isinstance(command, messages.Submit):
            self._start(
                session, command, lambda: self._core.submit(command, session.gateway_id, self._unread_s)
            )
        elif isinstance(command, messages.Import):
            state = msgspec.structs.replace(command.state, gateway_id=session.gateway_id)
            self._start(session, state.submit, lambda: self._core.import_(state))
        elif isinstance(command, messages.Cancel):
            if self._owns(session, command.sequence_id):
                self._core.cancel(command.sequence_id, command.cause)
        elif isinstance(command, messages.TopUp):
            if self._owns(session, command.sequence_id):
                self._core.top_up(command.sequence_id, command.lease_tokens, command.lease_gpu_us)
        elif isinstance(command, messages.Acknowledge):
            settled = self._store.acknowledge(session.gateway_id, command.sequence_ids)
            if command.is_traced and self._spans is not None:
                for held in settled:
                    self._spans.settled(held.outcome, held.ended_ns)
        elif isinstance(command, messages.Collect):
            self._collects.append((session, command.adopt))
        elif isinstance(command, messages.SetPolicy):
            self._set_policy(session, command)
        elif isinstance(command, messages.SetKnobs):
            self._set_knobs(session, command.knobs)
        elif isinstance(command, messages.SetBrakes):
            self._set_brakes(session, command.shares)
        elif isinstance(command, messages.Explain):
            self._send(session, messages.encode(self._core.explain(command.steps)))
        else:
            self._export(session, command)

    def _owns(self, session: GatewaySession, sequence_id: str) -> bool:
        """Whether a live sequence is the session's; one that has ended belongs to none."""
        owner = self._gateways.owner(sequence_id)
        if owner is not None and owner is not session:
            self._warn(
                f"gateway {session.gateway_id!r} named sequence {sequence_id[:128]!r} of gateway"
                f" {owner.gateway_id!r}: ignored",
                self._clock(),
            )
        return owner is session

    def _greet(self, identity: bytes, hello: messages.Hello, now_s: float) -> None:
        answer = self._gateways.hello(identity, hello, now_s)
        if isinstance(answer, HelloRefused):
            self._warn(f"refused gateway {hello.gateway_id[:128]!r}: {answer.message}", now_s)
            self._refuse(identity, "", answer.code, answer.message)
        elif answer is not None:
            log.info("gateway %s connected", answer.session.gateway_id)
            if answer.superseded is not None:
                self._abandon(answer.superseded, "connected anew")
                # Before anything is read of the new session: it may settle what went on elsewhere.
                self._deliver(self._core.take_ended(), step=0, duration_s=0.0, service={})
            self._core.table.standings.begin_words()
            ready = msgspec.structs.replace(self._ready, session=answer.session.secret)
            self._send(answer.session, messages.encode(ready))

    def _start(
        self, session: GatewaySession, submit: messages.Submit, start: Callable[[], messages.Refused | None]
    ) -> None:
        sequence_id = submit.sequence_id
        if self._drain_until_s is not None:
            refused = messages.Refused(sequence_id, "shutting_down", "the engine is shutting down")
        elif sequence_id in self._store or self._gateways.owner(sequence_id) is not None:
            refused = messages.Refused(sequence_id, "duplicate", f"sequence {sequence_id!r} exists already")
        elif not self._store.has_room(self._gateways.live_sequences):
            refused = messages.Refused(
                sequence_id,
                "outcomes_full",
                f"{len(self._store)} outcomes wait for their settlement: the engine takes nothing more",
            )
        else:
            accepted = start()
            if accepted is None:
                self._gateways.own(session, sequence_id, submit.tenant_id)
                if self._spans is not None:
                    self._spans.came(sequence_id, submit.trace_context)
                return
            refused = accepted
        self._send(session, messages.encode(refused))

    def _export(self, session: GatewaySession, command: messages.Export) -> None:
        sequence_id, state = command.sequence_id, None
        if self._owns(session, sequence_id):
            state = self._core.export(sequence_id, with_kv=not command.without_kv)
        payload = messages.encode(messages.Exported(sequence_id, state))
        if state is not None:
            self._gateways.release(sequence_id)
            if len(payload) > MAX_MESSAGE_BYTES:
                state = msgspec.structs.replace(state, kv=[])
                payload = messages.encode(messages.Exported(sequence_id, state))
        self._send(session, payload)

    def _set_policy(self, session: GatewaySession, wanted: messages.SetPolicy) -> None:
        error = ""
        try:
            self._core.set_policy(wanted.name, options_of(wanted.options))
            self._ready = msgspec.structs.replace(self._ready, policy=wanted.name)
        except ValueError as failure:
            error = str(failure)
        self._send(session, messages.encode(messages.PolicySet(wanted.name, error)))

    def _set_knobs(self, session: GatewaySession, knobs: messages.EngineKnobs) -> None:
        try:
            self._core.set_knobs(knobs)
        except ValueError as error:
            self._warn(f"gateway {session.gateway_id!r}: {error}", self._clock())
            return
        self._knobs_of = session

    def _set_brakes(self, session: GatewaySession, shares: dict[int, float]) -> None:
        try:
            self._core.set_brakes(shares)
        except ValueError as error:
            self._warn(f"gateway {session.gateway_id!r}: {error}", self._clock())

    def _answer_collects(self) -> None:
        # Sequences of ended sessions are being cancelled; their outcomes belong to the answer.
        if not self._collects or (self._gateways.unread() and self._core.has_work()):
            return
        while self._collects:
            session, adopt = self._collects.popleft()
            if not self._gateways.lives(session):
                continue
            outcomes = self._store.collect(
                session.gateway_id, adopt_from_all_but=self._gateways.live_gateway_ids if adopt else None
            )
            running = [live for live in self._core.running() if live.sequence_id in session.tenants]
            heard = sorted(self._gateways.live_gateway_ids)
            inventory = messages.Inventory(self._ready.engine_id, running, outcomes, heard)
            self._send(session, messages.encode(inventory))

    # ----------------------------------------------------------------- steps

    def _step(self) -> None:
        result = self._core.step()
        self._changed = True
        self._unaudited_s = self._clock()
        self._idle = not (result.num_tokens or result.deltas or self._core.steps_in_flight)
        self._deliver(
            (delta for deltas in result.deltas.values() for delta in deltas),
            step=result.step,
            duration_s=result.duration_s,
            service=result.shares,
        )
        if self._core.device_lost is not None:
            raise self._core.device_lost

    def _deliver(
        self, deltas: Iterable[Delta], *, step: int, duration_s: float, service: dict[str, ServiceShare]
    ) -> None:
        """Sends one message a session; outcomes are stored before they are sent."""
        shares = self._gateways.share_service(service)
        parts: dict[bytes, list[Delta]] = {}
        for delta in deltas:
            if delta.outcome is None:
                session = self._gateways.owner(delta.sequence_id)
            else:
                session = self._gateways.release(delta.sequence_id)
                ended_ns = 0 if self._spans is None else time.time_ns()
                self._store.keep(session.gateway_id if session else "", delta.outcome, ended_ns)
            if session is not None and self._gateways.lives(session):
                parts.setdefault(session.identity, []).append(delta)
        for session in self._gateways.sessions:
            mine, served = parts.get(session.identity, []), shares.get(session.identity, {})
            if mine or served:
                message = messages.Step(step=step, duration_s=duration_s, deltas=mine, service=served)
                self._send(session, messages.encode(message))

    def _report(self, now_s: float) -> None:
        """Sends the load to every session without a backlog."""
        if now_s - self._snapshot_s < (SNAPSHOT_EVERY_S if self._changed else IDLE_SNAPSHOT_EVERY_S):
            return
        self._snapshot_s = now_s
        self._changed = False
        if self._on_tick is not None:
            self._on_tick(now_s)
        sessions = self._gateways.sessions
        if sessions:
            snapshot = self._core.snapshot(self._ready.engine_id)
            if self._spans is not None and self._spans.lost:
                snapshot = msgspec.structs.replace(snapshot, traces_lost=self._spans.lost)
            payload = messages.encode(snapshot)
            for session in sessions:
                if session.identity not in self._backlogs:
                    self._send(session, payload, keep=False)

    def _audit(self, now_s: float) -> None:
        """Audits the core when idle, once a busy period. Raises AssertionError: the engine must end."""
        since_s = self._unaudited_s
        if since_s is not None and now_s - since_s >= IDLE_AUDIT_S and not self._core.has_work():
            self._unaudited_s = None
            self._core.check()

    # --------------------------------------------------------------- sending

    def _send(self, session: GatewaySession, payload: bytes, *, keep: bool = True) -> None:
        """Sends; with `keep`, keeps for later what the session's queue does not take."""
        backlog = self._backlogs.get(session.identity)
        if backlog is None:
            if not self._gateways.lives(session) or self._try_send(session, payload) or not keep:
                return
            if not self._gateways.lives(session):
                return
            backlog = self._backlogs[session.identity] = UnsentMessages(self._clock())
        backlog.payloads.append(payload)
        backlog.size_bytes += len(payload)
        if backlog.size_bytes > MAX_BACKLOG_BYTES:
            self._lose(session, f"it left {MAX_BACKLOG_BYTES >> 20} MiB unread")

    def _try_send(self, session: GatewaySession, payload: bytes) -> bool:
        """False when the queue is full; a session whose connection is gone is lost."""
        try:
            self._socket.send_multipart([session.identity, payload], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lose(session, "its connection is closed")
            return False
        return True

    def _flush(self, now_s: float) -> None:
        for identity, backlog in list(self._backlogs.items()):
            session = self._gateways.find(identity)
            if session is None:
                del self._backlogs[identity]
                continue
            while backlog.payloads and self._try_send(session, backlog.payloads[0]):
                backlog.size_bytes -= len(backlog.payloads.popleft())
            if not backlog.payloads:
                self._backlogs.pop(identity, None)
            elif now_s - backlog.since_s > self._backlog_s:
                self._lose(session, f"it read nothing for {self._backlog_s:g} s")

    def _refuse(self, identity: bytes, sequence_id: str, code: str, message: str) -> None:
        """Answers a peer without a session; delivery is not guaranteed."""
        try:
            payload = messages.encode(messages.Refused(sequence_id, code, message))
            self._socket.send_multipart([identity, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("no refusal sent to %s: %s", _name(identity), error)

    def _lose(self, session: GatewaySession, why: str) -> None:
        if self._gateways.lives(session):
            self._gateways.end(session)
            self._abandon(session, why)

    def _abandon(self, session: GatewaySession, why: str) -> None:
        log.warning(
            "gateway %s lost: %s; %d sequences cancelled", session.gateway_id, why, len(session.tenants)
        )
        self._backlogs.pop(session.identity, None)
        if session is self._knobs_of:
            self._knobs_of = None
            self._core.set_knobs(messages.EngineKnobs())
        for sequence_id in session.tenants:
            self._core.cancel(sequence_id, "cancelled", "gateway lost")

    # --------------------------------------------------------------- the end

    def _end(self, now_s: float) -> str:
        """Reason for the loop to end now; empty: it goes on."""
        # A session that has not been given up is no orphan's: the engine's own process may have stood still.
        if not self._gateways.sessions and self._gateways.unheard_s(now_s) >= self._orphan_s:
            return f"no gateway was heard for {self._orphan_s:g} s"
        if self._drain_until_s is None:
            return ""
        if self._gateways.live_sequences:
            if self._cancelled_s is None and now_s >= self._drain_until_s:
                self._cancelled_s = now_s
                for live in self._core.running():
                    self._core.cancel(live.sequence_id, "failed", "the engine was stopped")
            if self._cancelled_s is None or now_s - self._cancelled_s < CANCEL_S:
                return ""
        if self._settle_until_s is None:
            self._settle_until_s = now_s + SETTLE_S
        if len(self._store) and self._gateways.sessions and now_s < self._settle_until_s:
            return ""
        return "it was asked to stop"

    def _wait(self) -> None:
        """Waits for a command, or until something is due."""
        until_s = self._snapshot_s + (SNAPSHOT_EVERY_S if self._changed else IDLE_SNAPSHOT_EVERY_S)
        wait_s = max(0.0, until_s - self._clock())
        if self._backlogs:
            wait_s = min(wait_s, RETRY_S)
        elif self._core.has_work():
            # A deliberate wait of the policy, until then or until something arrives.
            due_s = self._core.wait_until_s
            due_s = RETRY_S if due_s is None else due_s - self._clock()
            wait_s = min(wait_s, max(0.0, due_s))
        self._socket.poll(round(wait_s * 1000) + 1, zmq.POLLIN)

    def _warn(self, message: str, now_s: float) -> None:
        if now_s - self._warned_s < WARN_EVERY_S:
            self._suppressed += 1
            return
        suffix = f" (and {self._suppressed} more)" if self._suppressed else ""
        self._warned_s, self._suppressed = now_s, 0
        log.warning("%s%s", message, suffix)


def _name(identity: bytes) -> str:
    return repr(identity.rpartition(b"/")[0].decode(errors="replace"))
