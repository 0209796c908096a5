"""`helm test`: waits until a gateway is ready, and asks it for one completion with a key of ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from typing import Any

WAIT_S = 600.0
TIMEOUT_S = 150.0
"""Of one request: it may wait in the queue."""


def call(path: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, head), timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def fairgate(*words: str) -> Any:
    return json.loads(subprocess.run(["fairgate", *words, "--json"], stdout=-1, check=True).stdout)


def wait_until_ready() -> None:
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            call("/readyz")
            return
        except OSError as error:
            said = error.read().decode() if isinstance(error, urllib.request.HTTPError) else str(error)
            if time.monotonic() > until_s:
                sys.exit(f"{URL} was not ready within {WAIT_S:g} s: {said}")
            time.sleep(2)


URL = sys.argv[1]
wait_until_ready()
made = fairgate("key", "create", "--tenant", "owner", "--expires-in", "10m")
try:
    model = call("/v1/models", key=made["key"])["data"][0]["id"]
    asked = {"model": model, "messages": [{"role": "user", "content": "Count from 3 to 9."}], "max_tokens": 16}
    said = call("/v1/chat/completions", asked, made["key"])
    print(f"{model} at {URL}: {said['choices'][0]['message']['content']!r}, {said['usage']}")
finally:
    fairgate("key", "revoke", made["id"])
