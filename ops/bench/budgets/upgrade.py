"""Two releases side by side: gateways are replaced by those of a newer one while clients ask.

The newer release is this code with one more migration, under a version of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from engine.client.client import EngineUnavailable
from migrations import runner
from ops.bench.budgets.audit import COUNTED, KEYS, Witness, gather, judge
from ops.bench.budgets.scenarios import question_chats
from ops.bench.budgets.testbed import ScenarioFailed, Testbed, open_testbed
from ops.bench.common.attempts import TIMEOUT_S, ClientAttempt, ClientRequest, ask_once
from ops.bench.common.http_client import LoadHttpClient
from ops.sandbox.server import ROOT, ServerFailed, environment, until

NAME = "upgrade"
VERSION = "999.0.0"
REQUESTS = 2_000
CLIENTS = 6
BETWEEN_STEPS = 100
STEP_S = 60.0
WATCH_S = 0.2
LONG_EVERY, LONG_TOKENS, SHORT_TOKENS = 10, 300, 12
"""Some streams are still under way when their gateway gets SIGTERM."""
MAX_EXAMPLES = 5
SERVES = ("--gateway-drain", "30", "--gateway-stale", "15", "--gateway-lease", "60")
"""Arguments of the gateways: as they are by default, where the testbed's find a dead one sooner."""
MIGRATION = """
import sqlalchemy as sa
from alembic import op
revision, down_revision, branch_labels, depends_on = "{revision}", "{before}", None, None
NEEDS_RELEASE = "{version}"

def upgrade():
    op.add_column("ledger", sa.Column("drill_new", sa.Text()))
    op.add_column("gateways", sa.Column("drill_old", sa.Text()))

def downgrade():
    op.drop_column("ledger", "drill_new")

def contract():
    op.drop_column("gateways", "drill_old")
"""


def program_of(tree: Path) -> tuple[str, ...]:
    """`fairgate` of the code in `tree`."""
    return ("env", f"PYTHONPATH={tree}", sys.executable, "-P", "-m", "ops.cli.main")


def next_release(tree: Path) -> None:
    """Makes `tree` the newer release: links to this code, one more migration, and the version's name."""
    before = runner.head()
    revision = f"{int(before) + 1:04}"
    (tree / "migrations" / "versions").mkdir(parents=True)
    packages = (ROOT / name for name in ("engine", "gateway", "kernels", "ops", "tenants"))
    for source in (*packages, *ROOT.glob("migrations/*.*"), *ROOT.glob("migrations/versions/*.py")):
        (tree / source.relative_to(ROOT)).symlink_to(source)
    text = MIGRATION.format(revision=revision, before=before, version=VERSION)
    (tree / "migrations" / "versions" / f"{revision}_drill.py").write_text(text)
    metadata = tree / f"fairgate-{VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: fairgate\nVersion: {VERSION}\n")


class Balancer:
    """Passes connections on in turn to gateways whose `/readyz` is 200; where one refuses, to the next."""

    def __init__(self, gateways: Sequence[str]) -> None:
        self.gateways = list(gateways)
        """Their URLs."""
        self.ready = list(gateways)
        self._turn = itertools.count()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        """The URL for clients."""
        server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        watching = asyncio.create_task(self._watch())
        try:
            yield "http://{}:{}".format(*server.sockets[0].getsockname())
        finally:
            watching.cancel()
            server.close()

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            while True:
                ready = []
                for url in self.gateways:
                    with contextlib.suppress(httpx.HTTPError):
                        ready += [url] * (await client.get(f"{url}/readyz")).is_success
                self.ready = ready
                await asyncio.sleep(WATCH_S)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready, first = self.ready, next(self._turn)
        for place in range(len(ready)):
            target = urlsplit(ready[(first + place) % len(ready)])
            with contextlib.suppress(ConnectionRefusedError):
                theirs, ours = await asyncio.open_connection(target.hostname, target.port)
                await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))
                return
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def replace_all(
    testbed: Testbed,
    balancer: Balancer,
    new: Sequence[str],
    answered: Callable[[], int],
    between: int = BETWEEN_STEPS,
) -> None:
    """Upgrades the database, replaces every gateway by one of `new`, and contracts, `between` answers
    after each step: `answered` counts them. Raises `ScenarioFailed`."""

    async def more(what: str) -> None:
        enough = answered() + between

        async def seen() -> bool:
            return answered() >= enough and balancer.ready == balancer.gateways

        if not await until(seen, STEP_S):
            raise ScenarioFailed(f"{what}: {answered()} answers of {enough}, ready are {balancer.ready}")

    async def upgrade(expected: int, words: str, *arguments: str) -> None:
        at = ("--database-url", testbed.postgres.url, "--data-dir", str(testbed.directory / "command"))
        process = await asyncio.create_subprocess_exec(
            *(*new, "db", "upgrade", *arguments, *at),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(),
        )
        said = (await process.communicate())[0].decode().strip()
        if process.returncode != expected or words not in said:
            raise ScenarioFailed(f"db upgrade {arguments} ended with {process.returncode}: {said}")

    old, testbed.program = testbed.program, new
    await more("before")
    await upgrade(0, "")
    await more("old gateways on the newer schema")
    for left in list(testbed.servers):
        await upgrade(1, "older gateways serve", "--contract")
        await testbed.start_gateways(len(testbed.servers) + 1)
        balancer.gateways.append(testbed.servers[-1].url)
        await more("with a new gateway")
        left.process.terminate()
        if await left.process.wait():
            raise ScenarioFailed(f"a drained gateway ended with {left.process.returncode}")
        balancer.gateways.remove(left.url)
        await more("without an old gateway")
    await upgrade(0, "contracted", "--contract")
    await more("after the contract step")
    testbed.program, refusal = old, "it serves"
    try:
        await testbed.start_gateways(len(testbed.servers) + 1)
    except ServerFailed as error:
        refusal = str(error)
    if f"needs Fairgate {VERSION} or newer" not in refusal:
        raise ScenarioFailed(f"an old gateway on the contracted database: {refusal}")


async def run(old: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """The drill, from the code in `old` on, as a row of the report. Raises `NoServer`."""
    begun_s = time.monotonic()
    row: dict[str, Any] = {"scenario": NAME, "gateways": 2}
    with tempfile.TemporaryDirectory(prefix="fairgate-release-") as directory:
        next_release(Path(directory))
        beds = open_testbed(lambda what: progress(what, 0, 1), arguments=SERVES, program=program_of(old))
        try:
            async with beds as testbed:
                await testbed.start_gateways(2)
                await testbed.ready()
                progress(NAME, 0, 1)
                row |= await drilled(testbed, program_of(Path(directory)), REQUESTS)
        except (ScenarioFailed, ServerFailed, EngineUnavailable, OSError) as error:
            row["broken"] = [str(error) or type(error).__name__]
    return row | {"ok": not row["broken"], "took_s": round(time.monotonic() - begun_s, 1)}


async def drilled(testbed: Testbed, new: Sequence[str], requests: int) -> dict[str, Any]:
    """The figures of a drill with at least `requests` requests. Raises `ScenarioFailed`."""
    tenant = await testbed.tenant(NAME, meter="output_tokens", amount=10**8, window="lifetime")
    await testbed.known(tenant)
    chats = await asyncio.to_thread(question_chats)
    answers: list[ClientAttempt] = []
    streams: list[ClientAttempt] = []
    numbers, is_over, failure = itertools.count(), False, ""
    witness, balancer = Witness(testbed.engine_address), Balancer([one.url for one in testbed.servers])

    async def ask_on(url: str, keeps_connections: bool) -> None:
        client = LoadHttpClient(timeout_s=TIMEOUT_S)
        while not is_over or len(answers) < requests:
            number = next(numbers)
            body = {"model": testbed.model, "messages": chats[number % len(chats)], "ignore_eos": True}
            body |= {"max_tokens": SHORT_TOKENS if number % LONG_EVERY else LONG_TOKENS}
            kind = streams if number % 2 == 0 else []
            ask = ClientRequest(tenant.tenant_id, tenant.key, body | {"stream": kind is streams})
            answers.append(await ask_once(client, url, ask))
            kind.append(answers[-1])
            if not keeps_connections:
                client.close()
        client.close()

    try:
        pid = await witness.start()
        async with balancer.open() as url, asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(ask_on(url, number % 2 == 0))
            try:
                await replace_all(testbed, balancer, new, lambda: len(answers))
            except (ScenarioFailed, ServerFailed) as error:
                failure = str(error)
            is_over = True
        findings = judge(await gather(testbed, witness, pid, [tenant], answers))
    finally:
        await witness.close()
    failed = [one for one in answers if one.status != 200 or not one.is_whole or one.code]
    examples = [f"{one.status} {one.code or 'broke off'} {one.request_id}" for one in failed[:MAX_EXAMPLES]]
    return {
        **{key: getattr(findings, key) for key in (*KEYS, *COUNTED)},
        "requests": len(answers),
        "streams": len(streams),
        "failed": len(failed),
        "server_errors": sum(one.status >= 500 for one in failed),
        "broken_streams": sum(one in failed for one in streams),
        "broken": [*filter(None, [failure]), *examples, *findings.examples],
    }
