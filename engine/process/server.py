"""Engine process: start-up and shutdown.

`python -m engine.process.server` (and `fairgate engine`): lock, address, model, loop, outcomes file. In a
session of its own, it outlives the gateway that started it. A failed start is one line on stderr and exit
code 1.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import secrets
import signal
import socket as sockets
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from msgspec import structs
from zmq.auth.thread import ThreadAuthenticator

from engine.client.keys import EngineKeys, KeysRefused, engine_keys
from engine.client.zmq_link import MAX_MESSAGE_BYTES
from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import NoTokenizer, load_texts
from engine.core.first_steps import timed_steps
from engine.core.learned_state import (
    LearnedKey,
    LearnedStateWriter,
    learned_path,
    load_step_time,
    samples_path,
)
from engine.core.model_runner import DeviceLost
from engine.grammar.compiler import Grammars
from engine.grammar.forms import form_of
from engine.messages import PROTOCOL_VERSION, Ready
from engine.process.capacity import DEFAULTS, CapacityRefused, step_sizes
from engine.process.fingerprint import machine_name, model_fingerprint, tokenizer_fingerprint
from engine.process.lock import EngineLock, LockContent, LockHeld, lock_path, pid_namespace
from engine.process.loop import EngineLoop
from engine.process.options import AUTO_STEPS_AHEAD, MAX_SOCKET_PATH_BYTES, EngineOptions
from engine.process.outcomes import OutcomeStore, OutcomesUnreadable, read_outcomes, write_outcomes
from engine.process.profiling import measured_sizes
from engine.process.spans import EngineSpans
from engine.scheduling.policy import make_policy, options_of
from engine.telemetry.sender import SpanTarget, TelemetryMissing, open_sender
from kernels.gpu.compiling import KernelRefused, use_cache

if TYPE_CHECKING:
    from engine.model.probe_attachment import ProbeFollower

SEND_QUEUE_MESSAGES = 1_000
RECEIVE_QUEUE_MESSAGES = 10_000
DRAIN_S = 2.0
"""How long running sequences go on after SIGTERM."""
LINGER_MS = 500
DOMAIN = "fairgate"
"""Of the authentication of peers on tcp."""

log = logging.getLogger("fairgate.engine")


class StartRefused(Exception):
    """The engine cannot start; the message says why and what to do."""


class AuthorisedGateways:
    """The gateways that may connect: those that prove that they have the secret of this public key."""

    def __init__(self, gateway_public: str) -> None:
        self._public_key = gateway_public.encode()

    def callback(self, domain: str, public_key: bytes) -> bool:
        """As ZeroMQ's authenticator asks; `public_key` is Z85 text."""
        return domain == DOMAIN and public_key == self._public_key


def run_engine(options: EngineOptions) -> int:
    """Runs an engine until it is stopped or orphaned; returns the exit code (1: it could not start)."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    os.umask(0o077)
    os.nice(options.niceness)
    if options.cores:
        os.sched_setaffinity(0, map(int, options.cores.split(",")))
    if options.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    try:
        with _lock(options), _bound_socket(options) as socket:
            return _serve(options, socket)
    except StartRefused as error:
        print(f"fairgate engine: {error}", file=sys.stderr, flush=True)
        return 1


def _serve(options: EngineOptions, socket: zmq.Socket[bytes]) -> int:
    # What is loaded lives as long as the process: it is neither looked through while it comes, which takes a
    # seventh of the start, nor ever after, which would hold up a step by some hundred milliseconds.
    gc.disable()
    core, ready, learned_writer, probe = _load(options)
    gc.collect()
    gc.freeze()
    gc.enable()
    path = options.data_dir / f"{options.engine_id}.outcomes"
    store = OutcomeStore()
    try:
        store.restore(read_outcomes(path), on_settled=lambda: path.unlink(missing_ok=True))
    except OutcomesUnreadable as error:
        # Never overwrite what a person may still be able to read.
        kept = path.rename(path.with_name(f"{path.name}.damaged-{int(time.time())}"))
        log.error("%s; it is kept as %s, and its outcomes must be settled by hand", error, kept)

    def tick(now_s: float) -> None:
        learned_writer.tick(now_s)
        probe.tick(now_s)

    spans = _spans(options)
    loop = EngineLoop(
        core,
        socket,
        ready,
        store,
        orphan_s=options.orphan_s,
        clock=time.monotonic,
        on_tick=tick,
        spans=spans,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.stop(DRAIN_S))
    log.info("engine %s serves %s at %s", options.engine_id, ready.model.model_id, options.address)
    code = 0
    try:
        log.info("engine ends: %s", loop.run())
    except DeviceLost as error:
        log.error("engine ends, as its device is lost: %s", error)
        code = 1
    except Exception:
        log.exception("engine fails")
        code = 1
    learned_writer.keep()
    if spans is not None:
        spans.close()
    try:
        write_outcomes(path, store)
    except OSError as error:
        log.error("%d outcomes cannot be kept in %s: %s", len(store), path, error.strerror)
        code = 1
    return code


def _spans(options: EngineOptions) -> EngineSpans | None:
    if not options.otlp:
        return None
    target = SpanTarget(options.otlp, options.spans_per_s)
    resource = {
        "service.name": f"{os.environ.get('OTEL_SERVICE_NAME') or 'fairgate'}-engine",
        "service.instance.id": options.engine_id,
    }
    try:
        return EngineSpans(open_sender(target, resource))
    except TelemetryMissing as error:
        raise StartRefused(str(error)) from None


def _load(options: EngineOptions) -> tuple[EngineCore, Ready, LearnedStateWriter, ProbeFollower]:
    try:
        policy_options = options_of(json.loads(options.policy_options))
        make_policy(options.policy, policy_options)
        texts = load_texts(options.model_dir)
    except (ValueError, NoTokenizer) as error:
        raise StartRefused(str(error)) from None
    try:
        from engine.model.device import device_of
        from engine.model.loader import ModelRefused, load_model
        from engine.model.probe_attachment import ProbeFollower, samples_of, threads_in_use
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "safetensors", "torch", "transformers"}:
            raise
        raise StartRefused(f"{error.name} is not installed: install fairgate[engine]") from None
    try:
        kind = device_of(options.named()["device"]).type
        steps = step_sizes(kind, options)
        config = EngineConfig(
            policy=options.policy,
            policy_options=policy_options,
            max_batched_tokens=steps.max_batched_tokens,
            max_sequences=steps.max_sequences,
            max_waiting=options.max_waiting,
            watermark_permille=options.kv_watermark_permille,
            prefix_caching=options.prefix_caching,
            max_tokens_per_s=options.max_tokens_per_s,
            steps_ahead=None if options.steps_ahead == AUTO_STEPS_AHEAD else options.steps_ahead,
        )
    except ValueError as error:
        raise StartRefused(str(error)) from None
    try:
        if kind == "cuda":
            use_cache(options.data_dir / "triton")
        loaded = load_model(
            options.model_dir,
            check_block_tokens=options.block_tokens or DEFAULTS[kind].block_tokens,
            threads=options.threads or None,
            **options.named(),
        )
        sizes = measured_sizes(loaded, texts, options)
        runner = loaded.runner(
            num_blocks=sizes.num_blocks,
            block_tokens=sizes.block_tokens,
            num_host_blocks=sizes.num_host_blocks,
            num_rows=sizes.steps.max_sequences,
            context_tokens=sizes.context_tokens,
        )
    except (ModelRefused, CapacityRefused, KernelRefused) as error:
        raise StartRefused(str(error)) from None
    info, steps = runner.info, sizes.steps
    config = replace(config, max_sequences=steps.max_sequences, max_batched_tokens=steps.max_batched_tokens)
    log.info(
        "%s: %s, %d parameters, %s on %s, %s forward pass, attention %s",
        info.model_id, info.architecture, info.parameters, info.dtype, info.device, info.forward,
        info.attention,
    )  # fmt: skip
    captured = runner.capture(steps.max_batched_tokens)
    for line in (*runner.path_reports, *captured, *sizes.lines()):
        log.info("%s", line)
    fingerprint = model_fingerprint(options.model_dir)
    key = LearnedKey(
        machine_name(loaded.card_name),
        fingerprint,
        info.dtype,
        info.device,
        info.attention.partition(":")[0],
        threads_in_use(),
    )
    learned = learned_path(options.data_dir, options.engine_id)
    ready = Ready(
        engine_id=options.engine_id,
        model=structs.replace(runner.info, tokenizer=tokenizer_fingerprint(options.model_dir)),
        policy=options.policy,
        block_tokens=runner.block_tokens,
        num_blocks=runner.num_blocks,
        max_sequences=steps.max_sequences,
        max_batched_tokens=steps.max_batched_tokens,
        pid=os.getpid(),
        life=secrets.token_hex(4),
        kv_token_bytes=loaded.token_bytes,
    )
    step_time = load_step_time(learned, key) or timed_steps(runner, texts, config, time.monotonic)
    # Not before torch was found: transformers says at length that it is missing.
    from engine.answers.parser import AnswerForms

    form, readers = form_of(options.model_dir), None
    try:
        readers = None if form is None else AnswerForms(form, texts)
    except ValueError as error:
        log.warning("the model's response_template makes no sense, so all of its answers are text: %s", error)
    grammars = Grammars(options.model_dir / "tokenizer.json", info.vocabulary, info.eos_token_ids)
    core = EngineCore(
        runner, texts, config, time.monotonic, step_time=step_time, grammars=grammars, readers=readers
    )
    collected = samples_path(options.data_dir, options.engine_id)
    learned_writer = LearnedStateWriter(
        core,
        learned,
        key,
        (lambda kept: (collected, samples_of(runner, fingerprint, kept)))
        if options.collect_lengths
        else None,
        time.monotonic(),
    )
    probe = ProbeFollower(
        core.lengths, runner, options.model_dir, fingerprint, keep_states=options.collect_lengths
    )
    probe.look()
    return core, ready, learned_writer, probe


@contextlib.contextmanager
def _lock(options: EngineOptions) -> Iterator[None]:
    content = LockContent(
        pid=os.getpid(),
        address=options.address,
        engine_id=options.engine_id,
        protocol_version=PROTOCOL_VERSION,
        arguments=options.arguments(),
        pid_namespace=pid_namespace(),
    )
    try:
        options.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = EngineLock(lock_path(options.data_dir, options.engine_id), content)
    except LockHeld as error:
        raise StartRefused(str(error)) from None
    except OSError as error:
        raise StartRefused(f"data directory {options.data_dir} is not usable: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _bound_socket(options: EngineOptions) -> Iterator[zmq.Socket[bytes]]:
    address = options.address
    _check_address(address)
    try:
        keys = engine_keys(address, Path(options.keys_dir or options.data_dir), options.engine_id)
    except KeysRefused as error:
        raise StartRefused(str(error)) from None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    authenticator = None
    try:
        if keys is not None:
            authenticator = _authenticate(context, socket, keys)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise StartRefused(f"address {address} cannot be bound: {error.strerror}") from None
        yield socket
    finally:
        socket.close()
        if authenticator is not None:
            authenticator.stop()
        context.term()


def _authenticate(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: EngineKeys
) -> ThreadAuthenticator:
    """Has the socket encrypt, and take the connections of authorised gateways only."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN, AuthorisedGateways(keys.gateway_public))
    socket.zap_domain = DOMAIN.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_server = True
    return authenticator


def _check_address(address: str) -> None:
    """Raises `StartRefused` for an address that is not ours to bind. Over tcp keys say who may connect."""
    scheme, separator, rest = address.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > MAX_SOCKET_PATH_BYTES:
            raise StartRefused(
                f"address {address} is too long: "
                f"a Unix socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes"
            )
        Path(rest).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # ZeroMQ silently takes an existing socket file over; only a dead one's may be taken.
        with (
            sockets.socket(sockets.AF_UNIX) as probe,
            contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
        ):
            probe.settimeout(1.0)
            probe.connect(rest)
            raise StartRefused(f"address {address} is in use by another process")
    elif scheme != "tcp":
        hint = "" if separator else " (is ipc:// missing?)"
        raise StartRefused(f"address {address!r} must start with ipc:// or tcp://{hint}")


def main(arguments: list[str] | None = None) -> int:
    """The command line of `python -m engine.process.server`: what `EngineOptions.arguments` gives."""
    try:
        options = EngineOptions.of_arguments(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        print(f"fairgate engine: {error}", file=sys.stderr)
        return 2
    return run_engine(options)


if __name__ == "__main__":
    sys.exit(main())
