"""`make mutants`: does every broken rule make its test fail?

Exit code 1 when a mutation survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.lua import LUA_MUTATIONS
from tests.mutants.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("engine", "gateway", "kernels", "migrations", "ops", "tenants", "tests", "pyproject.toml")
LIMIT_S = 600


def survives(mutation: Mutation, tree: Path) -> bool:
    """Whether the named tests pass although the rule is broken. The tree is restored."""
    path = tree / mutation.path
    original = path.read_text()
    assert original.count(mutation.before) == 1, f"{mutation.name}: its place in {mutation.path} is gone"
    path.write_text(original.replace(mutation.before, mutation.after))
    try:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.tests],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        path.write_text(original)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest did not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main(names: list[str]) -> int:
    """Runs those named, or all."""
    chosen = [each for each in [*MUTATIONS, *LUA_MUTATIONS] if not names or each.name in names]
    with tempfile.TemporaryDirectory(prefix="fairgate-mutants-") as directory:
        tree = Path(directory)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        survivors = 0
        for mutation in chosen:
            survived = survives(mutation, tree)
            survivors += survived
            print(
                f"{'SURVIVED' if survived else 'caught  '}  {mutation.name}  ({mutation.tests})", flush=True
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
