"""`make mutants`: every broken rule must make its test fail.

As many mutations at once as there are cores, each in a tree of its own and with a Redis of its own; what is
found is printed in the order of the list. Exit code 1 when a mutation survives.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

from tests.mutants.books import BOOKS_MUTATIONS
from tests.mutants.console import CONSOLE_MUTATIONS
from tests.mutants.engine import ENGINE_MUTATIONS
from tests.mutants.flow import FLOW_MUTATIONS
from tests.mutants.http import DIALECT_MUTATIONS, HTTP_MUTATIONS
from tests.mutants.kernels import KERNEL_MUTATIONS, SAMPLING_KERNEL_MUTATIONS
from tests.mutants.lua import LUA_MUTATIONS
from tests.mutants.mutations import Mutation
from tests.support import services

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("docs", "engine", "gateway", "kernels", "migrations", "ops", "tenants", "tests", "pyproject.toml")
LIMIT_S = 600
END_S = 8.0
"""For a test run that is interrupted, to stop its servers."""
EVERY = [
    *LUA_MUTATIONS,
    *ENGINE_MUTATIONS,
    *FLOW_MUTATIONS,
    *HTTP_MUTATIONS,
    *DIALECT_MUTATIONS,
    *CONSOLE_MUTATIONS,
    *BOOKS_MUTATIONS,
    *KERNEL_MUTATIONS,
    *SAMPLING_KERNEL_MUTATIONS,
]

#: Nothing is rewritten or cached; what fails is not made smaller (tests/conftest.py).
PYTEST = ("-q", "-x", "--assert=plain", "--tb=line", "--hypothesis-profile=mutants", "-p", "no:cacheprovider",
          "-p", "tests.mutants.loaded")  # fmt: skip


class CouldNotRun(Exception):
    """The tests neither passed nor failed."""


@dataclass(frozen=True)
class Worker:
    """One mutation at a time is made here."""

    tree: Path
    environment: dict[str, str]

    async def survives(self, mutation: Mutation) -> bool:
        """Whether the named tests pass although the rule is broken. The tree is restored. Raises
        `CouldNotRun`."""
        path = self.tree / mutation.path
        original = path.read_text()
        if original.count(mutation.before) != 1:
            raise CouldNotRun(f"{mutation.name}: its place in {mutation.path} is gone")
        path.write_text(original.replace(mutation.before, mutation.after))
        try:
            code, output, errors = await self._pytest(mutation)
        finally:
            path.write_text(original)
        # A fixture that cannot be made (no server) is an error, not a failure.
        if code not in (0, 1) or (code == 1 and not re.search(r"^\d+ failed.* in ", output, re.MULTILINE)):
            raise CouldNotRun(f"{mutation.name}: pytest ended with {code}\n{output[-4000:]}{errors[-4000:]}")
        return code == 0

    async def _pytest(self, mutation: Mutation) -> tuple[int, str, str]:
        """Its exit code, what it printed, and its errors."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-B", "-m", "pytest", *PYTEST, mutation.tests),
            cwd=self.tree,
            env=self.environment | {"FAIRGATE_MUTANT": mutation.path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
        except TimeoutError:
            raise CouldNotRun(f"{mutation.tests} did not end within {LIMIT_S} s") from None
        finally:
            await _end(process)
        assert process.returncode is not None
        return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends it and all it started, if it still runs: first as Ctrl-C would, then by force."""
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.communicate(), END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.communicate(), END_S)


def workers(count: int, directory: Path, stack: ExitStack) -> list[Worker]:
    """So many, each with a copy of the tree and a Redis. All that their tests leave lies in `directory`."""
    # PostgreSQL does not run as root, and whom it runs as must get at its data.
    directory.chmod(0o755)
    first = directory / "tree-0"
    first.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, first / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, first / name)
    # By hash: of a file that was written twice within a second the time says nothing.
    compileall.compile_dir(first, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    made = []
    for number in range(count):
        tree, temporary = directory / f"tree-{number}", directory / f"tmp-{number}"
        if tree != first:
            shutil.copytree(first, tree)
        temporary.mkdir()
        server = services.start_redis()
        stack.callback(server.stop)
        own = {
            "FAIRGATE_TEST_REDIS_URL": server.url,
            "PYTHONPATH": str(tree),
            "TMPDIR": str(temporary),
            # Compiled kernels are kept there, under the path of their source.
            "XDG_CACHE_HOME": str(directory / "cache"),
        }
        made.append(Worker(tree, os.environ | own))
    return made


async def run(chosen: list[Mutation], made: list[Worker]) -> int:
    """Makes them all, and prints each as soon as those before it are there. How many survived."""
    waiting, found = list(reversed(list(enumerate(chosen)))), dict[int, str]()
    survivors = printed = 0

    async def work(worker: Worker) -> None:
        nonlocal survivors, printed
        while waiting:
            index, mutation = waiting.pop()
            start_s = time.monotonic()
            survived = await worker.survives(mutation)
            survivors += survived
            said = f"{'SURVIVED' if survived else 'caught  '} {time.monotonic() - start_s:6.1f} s"
            found[index] = f"{said}  {mutation.name}  ({mutation.tests})"
            while printed in found:
                print(found.pop(printed), flush=True)
                printed += 1

    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    loop.add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        async with asyncio.TaskGroup() as group:
            for worker in made:
                group.create_task(work(worker))
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    return survivors


def main(arguments: list[str]) -> int:
    """Runs the mutations that are named, or all."""
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutation (default: all of them)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=cores, help=f"at once (default: {cores}, the cores)")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {each.name for each in EVERY}:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    chosen = [each for each in EVERY if not options.names or each.name in options.names]
    start_s = time.monotonic()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairgate-mutants-")))
        made = workers(min(options.workers, len(chosen)), directory, stack)
        try:
            survivors = asyncio.run(run(chosen, made))
        except ExceptionGroup as failed:
            print("\n".join(map(str, failed.exceptions)), file=sys.stderr)
            return 2
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("interrupted", file=sys.stderr)
            return 130
    print(f"{len(chosen) - survivors} of {len(chosen)} caught in {time.monotonic() - start_s:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
