"""`helm test`: waits until a gateway is ready, and asks it for one completion with a key of ten minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

WAIT_S = 600.0
TIMEOUT_S = 150.0
"""Of one request: it may wait in the queue."""
URL = sys.argv[1]
QUESTION = {"messages": [{"role": "user", "content": "Count from 3 to 9."}], "max_tokens": 16}


def call(path: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data, head), timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def fairgate(*words: str) -> Any:
    done = subprocess.run(["fairgate", *words, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 3):  # 3: a gateway that starts or ends has not confirmed it
        sys.exit(f"`fairgate {' '.join(words)}` failed")
    return json.loads(done.stdout)


until_s = time.monotonic() + WAIT_S
while True:
    try:
        call("/readyz")
        break
    except OSError as error:
        if time.monotonic() > until_s:
            why = error.read().decode() if isinstance(error, HTTPError) else error
            sys.exit(f"{URL} was not ready within {WAIT_S:g} s: {why}")
        time.sleep(2)
made = fairgate("key", "create", "--tenant", "owner", "--expires-in", "10m")
try:
    model = call("/v1/models", key=made["key"])["data"][0]["id"]
    said = call("/v1/chat/completions", QUESTION | {"model": model}, made["key"])
    print(f"{model} at {URL}: {said['choices'][0]['message']['content']!r}, {said['usage']}")
finally:
    fairgate("key", "revoke", made["id"])
