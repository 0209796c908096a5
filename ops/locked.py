"""Audits the lock of third-party packages: `make check`; `make lock` writes it anew from what is installed.

`constraints.txt` has what the gateway and the engine need, `constraints-test.txt` what the suite, the linters
and other extras need beyond that: each package with its version and the SHA-256 of all its files, which pip
compares (`--require-hashes`). torch, Triton and CUDA's packages have none: they depend on the machine.
`python -m ops.locked 'fairgate[postgres,redis]'` prints the part of the lock that these need.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS: Mapping[str, str] = {
    "constraints.txt": "fairgate[engine]",
    "constraints-test.txt": "fairgate[engine,test,dev]",
}
"""Each file and what it serves; the second has nothing of the first."""
HEAD = "# Packages with the hashes of their files, see ops/locked.py. Written by 'make lock'.\n"
FREE = re.compile(r"(fairgate|torch|triton|nvidia-.*|cuda-.*)$")
_PIN = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[\w.!+-]+)(?P<hashes>(?: \\\n +--hash=sha256:[0-9a-f]{64})*)", re.M
)


def pins(text: str) -> dict[str, tuple[str, int]]:
    """The locked packages by canonical name: version and number of hashes."""
    return {
        canonicalize_name(found["name"]): (found["version"], found["hashes"].count("--hash"))
        for found in _PIN.finditer(text)
    }


def installed(root: str) -> dict[str, str]:
    """The versions of all packages that `root` requires on this machine, by canonical name."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [Requirement(root)]
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        try:
            package = distribution(wanted.name)
        except PackageNotFoundError:
            found[name] = "not installed"
            continue
        found[name] = package.version
        for each in map(Requirement, package.requires or ()):
            if each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                pending.append(each)
    return {name: version for name, version in found.items() if not FREE.match(name)}


def problems(locked: Mapping[str, tuple[str, int]], needed: Mapping[str, str]) -> Iterable[str]:
    for name in sorted(needed):
        version, hashes = locked.get(name, ("", 0))
        if not version:
            yield f"{name} {needed[name]} is required and not locked"
        elif not hashes:
            yield f"{name} {version} is locked without a hash"
        elif version != needed[name]:
            yield f"{name} is locked at {version}; installed: {needed[name]}"


def subset(text: str, needed: Iterable[str]) -> str:
    """The part of a lock that has the `needed` packages, by canonical name. Raises `KeyError` with the first
    one that is not in it."""
    found: dict[str, str] = {canonicalize_name(each["name"]): each[0] for each in _PIN.finditer(text)}
    return HEAD + "".join(f"{found[name]}\n" for name in sorted(needed))


def write() -> None:
    """Writes both files anew; uv finds the hashes on the package index."""
    done: set[str] = set()
    for file, root in LOCKS.items():
        wanted = {name: version for name, version in installed(root).items() if name not in done}
        done |= wanted.keys()
        lines = "".join(f"{name}=={version}\n" for name, version in sorted(wanted.items()))
        command = [
            "uv",
            "pip",
            "compile",
            "-",
            "--no-deps",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
            "-q",
        ]
        locked = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout
        Path(ROOT / file).write_text(f"{HEAD}{locked}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    texts = "".join((ROOT / file).read_text() for file in LOCKS)
    if found := list(problems(pins(texts), installed(LOCKS["constraints-test.txt"]))):
        sys.exit("The lock is wrong; 'make lock' writes it anew:\n" + "\n".join(found))
    if sys.argv[1:] and sys.argv[1:] != ["--write"]:
        sys.stdout.write(subset(texts, installed(sys.argv[1])))
