"""Streams with headers and comments before the first token, read by other SDKs than the suite's own.

The majors of `openai` before the installed one, LangChain and OpenAI's SDK for Node are looked for in a
directory of their own, as `make test-sdks` fills it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sdk_scripts import require_sdk
from tests.support.server_process import MODEL, Server, server_process
from tests.support.waiting_streams import full

OPENAI = """
import sys, json, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
stream = client.chat.completions.create(
    model=sys.argv[3], messages=[{"role": "user", "content": "hello"}], max_tokens=6, stream=True,
    stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
)
print(json.dumps({"version": openai.__version__}), flush=True)
chunks = list(stream)
print(json.dumps({
    "text": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "tokens": chunks[-1].usage.completion_tokens,
}))
"""
LANGCHAIN = """
import sys, json, langchain_openai
model = langchain_openai.ChatOpenAI(
    base_url=sys.argv[1], api_key=sys.argv[2], model=sys.argv[3], max_tokens=6, max_retries=0,
    stream_usage=True, extra_body={"ignore_eos": True},
)
print(json.dumps({"version": "langchain"}), flush=True)
chunks = list(model.stream("hello"))
print(json.dumps({
    "text": "".join(chunk.content for chunk in chunks),
    "tokens": sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata),
}))
"""
NODE = """
const OpenAI = require("openai");
const [url, key, model] = process.argv.slice(1);
(async () => {
  const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
  const stream = await client.chat.completions.create({
    model, messages: [{ role: "user", content: "hello" }], max_tokens: 6, stream: true,
    stream_options: { include_usage: true }, ignore_eos: true,
  });
  console.log(JSON.stringify({ version: "node" }));
  let text = "", tokens = 0;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    tokens = chunk.usage?.completion_tokens ?? tokens;
  }
  console.log(JSON.stringify({ text, tokens }));
})();
"""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = [
        "--engine-max-sequences",
        "1",
        "--gateway-long-tokens",
        "8192",
        "--gateway-tell-after-s",
        "0",
    ]
    with server_process(tmp_path_factory.mktemp("sdks"), chat_model, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def keys(narrow: Server) -> dict[str, str]:
    return {"crowd": narrow.tenant("crowd", tier="interactive"), "acme": narrow.tenant("acme")}


@pytest.mark.parametrize("sdk", ["openai", "openai1", "openai2", "langchain", "node"])
def test_a_stream_that_is_told_of_its_wait_is_parsed(narrow: Server, keys: dict[str, str], sdk: str) -> None:
    """The SDK has its stream while the request waits, and all of its text afterwards."""
    directory = Path() if sdk == "openai" else require_sdk(sdk)
    command = [sys.executable, "-c", LANGCHAIN if sdk == "langchain" else OPENAI]
    environment = os.environ | {"PYTHONPATH": str(directory), "NODE_PATH": str(directory / "node_modules")}
    if sdk == "node":
        node = shutil.which("node")
        assert node is not None, "Node's SDK is there, and Node is not"
        command = [node, "-e", NODE]
    with full(narrow, keys["crowd"]) as crowd:
        process = subprocess.Popen(
            [*command, f"{narrow.url}/v1", keys["acme"], MODEL],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        try:
            assert process.stdout is not None
            begun = json.loads(process.stdout.readline())["version"]
            assert begun in ("langchain", "node") or sdk in ("openai", f"openai{begun.split('.')[0]}")
            with narrow.http(keys["crowd"]) as client:
                for each in crowd:
                    client.delete(f"/v1/requests/{each}")
            said = json.loads(process.stdout.read())
            assert process.wait() == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    assert said["tokens"] == 6
    assert said["text"]
