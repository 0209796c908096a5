"""Fetches the console's third-party files anew: `make vendor`.

`gateway/console/assets/vendor/vendored.json` has each package's version, licence and archive, and each file's
place in it and SHA-256. For another version, change the list; the refusal prints the new hashes.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import httpx

from gateway.console.assets import FOLDER

VENDORED = FOLDER / "vendor"


def fetch() -> list[str]:
    """Writes every file of the list. Returns what is wrong: files whose content has another hash."""
    wrong = []
    for package in json.loads((VENDORED / "vendored.json").read_text()):
        answer = httpx.get(package["archive"], timeout=60.0, follow_redirects=True).raise_for_status()
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            for each in package["files"]:
                member = archive.extractfile(each["in_archive"])
                assert member is not None, each["in_archive"]
                content = member.read()
                digest = hashlib.sha256(content).hexdigest()
                if digest == each["sha256"]:
                    Path(VENDORED / each["file"]).write_bytes(content)
                else:
                    wrong.append(f"{each['file']} of {package['name']} {package['version']}: {digest}")
    return wrong


if __name__ == "__main__":
    if problems := fetch():
        sys.exit("Not written, their SHA-256 is not the listed one:\n" + "\n".join(problems))
