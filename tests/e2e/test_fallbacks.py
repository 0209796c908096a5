"""A chain of models: the next one takes what the one before it cannot, and the account says so.

The gateway has no engine; every pool is the shared server under another name, price, context or key.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from openai import OpenAI, RateLimitError

from ops.cli.main import cli
from tests.e2e.test_cli_serve import run_serve
from tests.support.server_process import MODEL, Server, server_process, until

HELLO: Any = [{"role": "user", "content": "Hello"}]
KEY_VARIABLE, SLOW_KEY_VARIABLE = "FALLBACK_KEY", "FALLBACK_SLOW_KEY"
PRICES = (
    "cheap=100/300/50,dear=1000/3000/500,small=100/300/50,narrow=100/300/50,frail=100/300/50,ghost=100/300/50"
)
SMALL_CONTEXT = 64
LONG = SMALL_CONTEXT + 16
"""`max_tokens` that does not fit into the small context."""
ALIASES = """
[aliases]
sized = { chain = ["small", "cheap"] }
strict = { chain = ["small", "dear"] }
lenient = { chain = ["small", "dear"], max_price = 10 }
thrifty = { chain = ["dear", "cheap"] }
alive = { chain = ["ghost", "frail", "cheap"] }
timely = { chain = ["narrow", "cheap"] }
gone = { chain = ["ghost", "small", "dear"] }
half = { cheap = 1, small = 1 }
"""
MOST_QUEUED = 2
"""Of one tenant, in one pool."""


class Announces(BaseHTTPRequestHandler):
    """A server that says which model it has, and is gone afterwards."""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": MODEL, "max_model_len": 1024}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, chat_model: Path, server: Server) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("fallbacks")
    key, slow_key = server.tenant("fallbacks"), server.tenant("slow-fallbacks")
    server.limit("slow-fallbacks", "output_tokens", 5, rate_per_s=1)
    frail = HTTPServer(("127.0.0.1", 0), Announces)
    threading.Thread(target=frail.serve_forever, daemon=True).start()
    pools: dict[str, dict[str, Any]] = {
        "cheap": {},
        "dear": {},
        "small": {"context_tokens": SMALL_CONTEXT},
        "narrow": {"max_concurrent": 1, "api_key_env": SLOW_KEY_VARIABLE, "whole_tokens": 0},
        "frail": {"url": f"http://127.0.0.1:{frail.server_port}/v1"},
        "ghost": {"url": "http://127.0.0.1:1/v1", "context_tokens": 1024},
    }
    lines: list[str] = []
    for name, fields in pools.items():
        common = {"url": f"{server.url}/v1", "api_key_env": KEY_VARIABLE, "tokenizer_dir": str(chat_model)}
        settings = {"name": f"at-{name}", "pool": name, "model": MODEL} | common | fields
        lines += ["[[upstreams]]", *(f"{field} = {json.dumps(value)}" for field, value in settings.items())]
    toml = home / "fallbacks.toml"
    toml.write_text("\n".join(lines) + ALIASES)
    arguments = ["--engine-serve", "no", "--config", str(toml), "--prices", PRICES]
    arguments += ["--gateway-max-queued-per-tenant", str(MOST_QUEUED)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, key)
        patch.setenv(SLOW_KEY_VARIABLE, slow_key)
        with server_process(home / "data", chat_model, *arguments) as running:
            frail.shutdown()
            frail.server_close()
            yield running


def post(
    server: Server, key: str, model: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": model, "messages": HELLO, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
    with server.http(key) as client:
        return client.post("/v1/chat/completions", json=body, headers=headers or {})


def taken(response: httpx.Response) -> tuple[str, list[tuple[str, str]], float]:
    """The pool that answered, those passed over with the reasons, and the price beside the first's."""
    assert response.status_code == 200, response.text
    answer = response.json()
    said = answer["fairgate"]["fallback"]
    assert answer["model"] == said["taken"]
    return said["taken"], passed(said), said["price_ratio"]


def passed(said: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["model"], each["reason"]) for each in said["tried"]]


def counted(server: Server) -> dict[tuple[str, str, str], float]:
    """`fairgate_fallbacks_total` by alias, model and reason."""
    found: dict[tuple[str, str, str], float] = {}
    with httpx.Client(base_url=server.url) as client:
        for line in client.get("/metrics").text.splitlines():
            if line.startswith("fairgate_fallbacks_total{"):
                labels, _, value = line.removeprefix("fairgate_fallbacks_total{").partition("} ")
                alias, model, reason = (label.partition("=")[2].strip('"') for label in labels.split(","))
                found[alias, model, reason] = float(value)
    return found


def test_what_is_too_long_for_the_first_model_goes_to_the_next(gateway: Server) -> None:
    key = gateway.tenant("context")
    assert taken(post(gateway, key, "sized")) == ("small", [], 1.0)
    long = post(gateway, key, "sized", max_tokens=LONG)
    assert taken(long) == ("cheap", [("small", "context")], 1.0)
    account = long.json()["fairgate"]
    assert account["fallback"]["asked"] == "sized"
    assert account["fallback"]["price_per_token_nanousd"] == {
        "input": 100.0, "cached_input": 50.0, "output": 300.0
    }  # fmt: skip
    with gateway.http(key) as client:
        shown = client.get(f"/v1/requests/{account['request_id']}").json()
    assert (shown["model"], passed(shown["fallback"])) == ("cheap", [("small", "context")])
    runner = CliRunner()
    text = runner.invoke(cli, ["request", "show", account["request_id"], "--data-dir", str(gateway.data_dir)])
    assert "- asked for sized; small was passed over: context" in text.stdout, text.output


def test_a_limit_that_the_first_models_price_exceeds_leaves_room_for_a_cheaper_one(gateway: Server) -> None:
    key = gateway.tenant("budget")
    assert taken(post(gateway, key, "thrifty")) == ("dear", [], 1.0)
    gateway.limit("budget", "cost_nanousd", 20_000, window="lifetime")
    cheaper = post(gateway, key, "thrifty")
    assert taken(cheaper) == ("cheap", [("dear", "budget")], 0.1)
    account = cheaper.json()["fairgate"]
    prompt, output = account["actual"]["input_tokens"], account["actual"]["output_tokens"]
    assert account["cost_nanousd"]["held"] == 100 * prompt + 300 * output, (
        "the hold is that of the pool taken"
    )
    assert account["cost_nanousd"]["charged"] <= account["cost_nanousd"]["held"]


def test_a_model_that_is_away_is_passed_over_whether_it_was_ever_there_or_not(gateway: Server) -> None:
    key = gateway.tenant("health")
    until(lambda: not gateway.status()["models"]["pools"]["frail"]["is_up"])
    assert taken(post(gateway, key, "alive")) == ("cheap", [("ghost", "health"), ("frail", "health")], 1.0)
    down = post(gateway, key, "frail")
    assert (down.status_code, down.json()["error"]["code"]) == (503, "engine_unavailable")


def test_a_full_queue_leaves_the_request_to_the_next_model(gateway: Server, server: Server) -> None:
    key = gateway.tenant("deadline")
    endless = {"model": "narrow", "messages": HELLO, "max_tokens": 900, "ignore_eos": True, "stream": True}
    progress = {"x-fairgate-progress": "1"}
    with ExitStack() as stack:
        client = stack.enter_context(gateway.http(key))

        def waiting() -> int:
            listed = client.get("/v1/requests").json()["data"]
            return sum(each["status"] == "waiting" for each in listed)

        while waiting() < MOST_QUEUED:  # the first ones run, or are sent ahead
            stream = client.stream("POST", "/v1/chat/completions", json=endless, headers=progress)
            assert stack.enter_context(stream).status_code == 200
        alone = post(gateway, key, "narrow")
        assert (alone.status_code, alone.json()["error"]["code"]) == (429, "tenant_queue_full")
        timely = post(gateway, key, "timely")
        assert taken(timely) == ("cheap", [("narrow", "deadline")], 1.0)
        for each in client.get("/v1/requests").json()["data"]:
            client.delete(f"/v1/requests/{each['id']}")
    until(server.is_idle)


def test_a_dearer_model_is_taken_only_where_the_alias_allows_it(gateway: Server) -> None:
    key = gateway.tenant("price")
    assert taken(post(gateway, key, "lenient", max_tokens=LONG)) == ("dear", [("small", "context")], 10.0)
    refused = post(gateway, key, "strict", max_tokens=LONG)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded", (
        "the error is that of the first model"
    )
    said = refused.json()["fairgate"]["fallback"]
    assert (said["asked"], said["taken"]) == ("strict", None)
    assert passed(said) == [("small", "context"), ("dear", "price")]
    away = post(gateway, key, "gone", {"idempotency-key": "gone-1"}, max_tokens=LONG)
    assert (away.status_code, away.json()["error"]["code"]) == (503, "engine_unavailable")
    assert passed(away.json()["fairgate"]["fallback"]) == [
        ("ghost", "health"), ("small", "context"), ("dear", "price")
    ]  # fmt: skip
    bad = post(gateway, key, "gone", n=99)
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "n")
    assert counted(gateway)["strict", "dear", "price"] == 1


def test_a_stream_says_it_in_its_last_chunk_and_a_refused_one_in_its_error(gateway: Server) -> None:
    key = gateway.tenant("streams")
    with OpenAI(api_key=key, base_url=f"{gateway.url}/v1", max_retries=0) as client:

        def stream(model: str) -> list[Any]:
            return list(
                client.chat.completions.create(
                    model=model, messages=HELLO, max_tokens=LONG, temperature=0, stream=True,
                    extra_body={"ignore_eos": True},
                )
            )  # fmt: skip

        chunks = stream("sized")
        said = chunks[-1].model_extra["fairgate"]["fallback"]
        assert (said["taken"], passed(said)) == ("cheap", [("small", "context")])
        assert {chunk.model for chunk in chunks} == {"cheap"}
        gateway.limit("streams", "output_tokens", LONG - 1, window="lifetime")
        with pytest.raises(RateLimitError) as refused:
            stream("thrifty")
    shown = refused.value.response.json()
    assert shown["error"]["code"] == "insufficient_quota"
    assert passed(shown["fairgate"]["fallback"]) == [("dear", "budget"), ("cheap", "budget")]


def test_a_quote_is_that_of_the_pool_taken_and_binds_to_it(gateway: Server) -> None:
    key = gateway.tenant("quotes")
    sizes = {"max_tokens": LONG}
    with gateway.http(key) as client:
        quoted = client.post("/v1/quotes", json={"model": "sized", "messages": HELLO} | sizes)
        refused = client.post("/v1/quotes", json={"model": "strict", "messages": HELLO} | sizes)
        dear = client.post("/v1/quotes", json={"model": "thrifty", "messages": HELLO} | sizes)
    assert quoted.is_success, quoted.text
    assert (quoted.json()["model"], passed(quoted.json()["fallback"])) == ("cheap", [("small", "context")])
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert passed(refused.json()["fairgate"]["fallback"]) == [("small", "context"), ("dear", "price")]
    token = quoted.json()["quotes"][0]["token"]
    bound = post(gateway, key, "sized", {"x-fairgate-quote": token}, **sizes)
    assert taken(bound) == ("cheap", [], 1.0)
    cost = bound.json()["fairgate"]["quote"]
    assert cost["kept"] is not None
    # Bound to the dear model, which its limit no longer pays for: a quote goes to no other.
    gateway.limit("quotes", "cost_nanousd", 60_000, window="lifetime")
    token = dear.json()["quotes"][0]["token"]
    spent = post(gateway, key, "thrifty", {"x-fairgate-quote": token}, **sizes)
    assert (spent.status_code, spent.json()["error"]["code"]) == (429, "insufficient_quota")
    assert passed(spent.json()["fairgate"]["fallback"]) == [("dear", "budget")]
    other = post(gateway, key, "sized", {"x-fairgate-quote": token}, **sizes)
    assert other.json()["error"]["code"] == "quote_mismatch"


def test_a_repeat_with_the_same_key_gets_the_same_answer_of_the_same_pool(gateway: Server) -> None:
    key, header = gateway.tenant("once"), {"idempotency-key": "order-1"}
    first = post(gateway, key, "sized", header, max_tokens=LONG)
    again = post(gateway, key, "sized", header, max_tokens=LONG)
    assert taken(first)[0] == "cheap"
    assert again.content == first.content
    assert again.headers["x-fairgate-idempotent-replay"] == "true"


def test_budgets_are_exact_over_both_pools(gateway: Server) -> None:
    key = gateway.tenant("exact")
    probe = post(gateway, key, "dear").json()["fairgate"]["cost_nanousd"]["held"]
    gateway.limit("exact", "cost_nanousd", 3 * probe + probe // 2, window="lifetime")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(gateway, key, "thrifty"), range(24)))
    came = Counter(each.json()["model"] if each.is_success else each.status_code for each in answers)
    assert came["dear"] >= 3
    assert came["cheap"] >= 1
    assert set(came) <= {"dear", "cheap", 429}
    charged = sum(each.json()["fairgate"]["actual"]["cost_nanousd"] for each in answers if each.is_success)
    state = gateway.limit_state("exact", "cost_nanousd")
    assert (state["used"], state["held"]) == (charged, 0)
    assert charged <= state["amount"]
    assert gateway.verify()["ok"]


def test_a_chain_is_a_name_like_others_and_a_key_may_be_allowed_it_alone(gateway: Server) -> None:
    gateway.tenant("names")
    only = gateway.key("names", models=["sized"])
    with gateway.http(only) as client:
        (shown,) = client.get("/v1/models").json()["data"]
        assert (shown["id"], shown["context_tokens"] > SMALL_CONTEXT) == ("sized", True)
        refused = client.post("/v1/chat/completions", json={"model": "cheap", "messages": HELLO})
        assert refused.status_code == 404
    assert taken(post(gateway, only, "sized", max_tokens=LONG))[0] == "cheap"
    weighted = post(gateway, gateway.key("names"), "cheap").json()
    assert "fallback" not in weighted["fairgate"]
    aliases = gateway.status()["models"]["aliases"]
    assert aliases["lenient"] == {"chain": ["small", "dear"], "max_price": 10.0}
    assert aliases["half"] == {"cheap": 1, "small": 1}
    toml = gateway.arguments[gateway.arguments.index("--config") + 1]
    listed = CliRunner(env={"FAIRGATE_ENGINE_SERVE": "no"}).invoke(
        cli, ["model", "list", "--config", toml, "--data-dir", str(gateway.data_dir), "--json"]
    )
    rows = {each["name"]: each for each in json.loads(listed.stdout)}
    assert rows["lenient"]["means"] == {"chain": ["small", "dear"], "max_price": 10.0}
    assert (rows["lenient"]["priced"], rows["half"]["priced"]) == (True, False)


@pytest.mark.parametrize(
    ("aliases", "says"),
    [
        (
            '{"a": {"chain": ["b"]}, "b": {"chain": ["a"]}}',
            "the chain of 'a' names the alias 'b', and so could go",
        ),
        ('{"a": {"chain": ["tiny", "ghost"]}}', "'a' means 'ghost', which is no model here; there are tiny"),
        ('{"a": {"chain": []}}', "'a': chain: must name 1 to 8 models; it names 0"),
        ('{"a": {"chain": ["tiny"], "max_price": -1}}', "'a': max_price: is -1, and must be above 0"),
    ],
)
def test_a_bad_chain_stops_the_start(tmp_path: Path, chat_model: Path, aliases: str, says: str) -> None:
    refused = run_serve(
        "--data-dir", str(tmp_path), "--model", str(chat_model), "--model-name", MODEL, "--aliases", aliases
    )  # fmt: skip
    assert refused.returncode != 0
    assert says in refused.stderr
