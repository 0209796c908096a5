"""Secrets and prompts are where they belong, and nowhere else: marked ones go through every route, page and
command of a server at its most talkative, and then everything that it wrote or says is searched for them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import click
import httpx
import psycopg
import pytest
import redis
from click.testing import CliRunner
from psycopg import sql

from ops.cli.main import cli
from tests.e2e.test_authorisation import RULES
from tests.e2e.test_console_crawl import crawled
from tests.support import services
from tests.support.console import Browser
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.webhook_receiver import Receiver, receiving

pytestmark = pytest.mark.attack

PROMPT = "the canary of the prompt sings 8c1f"
PASSWORD = "canary-of-the-password-41d7"
SECOND_PASSWORD = "canary-of-the-second-password-92e0"
WRONG_PASSWORD = "canary-of-a-wrong-password-17aa"
IN_URL = "token=canary-of-the-webhook-77d2"
ENGINE = "fairgate-engine"
DATABASE_PASSWORD = "canary-of-the-database-5b3c"
MAY_HOLD = {
    "pepper": {"pepper"},
    "owner-key": {"owner key"},
    "audit-key": {"audit key"},
    "set-up-link": {"set-up link"},
}
"""Files of the data directory that are there to hold one of them."""


@contextmanager
def role_and_database(server_url: str) -> Iterator[str]:
    """The URL of a database whose owner has a password of its own."""
    admin = services.libpq_url(server_url)
    url = services.create_database(server_url)
    name = services.database_name(url)
    role = sql.Identifier(f"{name}_owner")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(DATABASE_PASSWORD))
        )
        connection.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(sql.Identifier(name), role))
    parts = urlsplit(url)
    try:
        where = parts.netloc.rpartition("@")[2]
        yield urlunsplit(parts._replace(netloc=f"{name}_owner:{DATABASE_PASSWORD}@{where}"))
    finally:
        services.drop_database(server_url, url)
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.fixture(scope="module")
def database(postgres_server: str) -> Iterator[str]:
    with role_and_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as found:
        yield found


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def talkative(
    tmp_path_factory: pytest.TempPathFactory,
    chat_model: Path,
    database: str,
    redis_server: str,
    collector: OtlpReceiver,
) -> Iterator[Server]:
    services.delete_keys(redis_server)
    flags = ["--database-url", database, "--redis-url", redis_server, "--log-level", "debug"]
    flags += ["--telemetry-otlp", collector.url, "--telemetry-trace-ratio", "1"]
    flags += ["--gateway-webhook-private", "yes"]
    with server_process(tmp_path_factory.mktemp("talkative"), chat_model, *flags) as running:
        yield running
    services.delete_keys(redis_server)


def use_inference(server: Server, key: str) -> None:
    """Answers of all kinds, whole and streamed, and refusals for all kinds of reasons."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    plain = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat | {"tools": PROMPT}),
        ("/v1/chat/completions", chat | {"messages": PROMPT}),
        ("/v1/chat/completions", chat | {"messages": [{"role": PROMPT, "content": PROMPT}]}),
        ("/v1/chat/completions", chat | {"max_tokens": 1_000_000}),
        ("/v1/completions", plain | {"echo": True}),
        ("/v1/completions", plain | {"prompt": [PROMPT, 5]}),
        ("/v1/completions", plain | {"stop": [PROMPT]}),
        ("/v1/completions", plain | {"user": "a-user", "metadata": {"note": PROMPT}}),
        ("/v1/embeddings", {"model": MODEL, "input": PROMPT}),
        ("/v1/rerank", {"model": MODEL, "query": PROMPT, "documents": [PROMPT]}),
        ("/v1/quotes", {"model": MODEL, "prompt": PROMPT}),
    ]
    with server.http(key) as client:
        seen = {client.post(path, json=body).status_code for path, body in bodies}
        assert {200, 400} <= seen, seen
        for _ in range(2):
            assert client.post("/v1/completions", json=plain, headers={"idempotency-key": "once"}).is_success
        cut = json.dumps(plain)[:-5].encode()
        headers = {"content-type": "application/json"}
        assert client.post("/v1/completions", content=cut, headers=headers).status_code == 400
        assert client.post("/v1/completions", json=plain, headers={"api-key": key}).is_success
        over = client.post("/v1/completions", json=plain | {"max_tokens": 200})
        assert over.status_code == 429


def ask_every_route(server: Server, key: str) -> None:
    """With the key where it belongs, and where users put it by mistake."""
    with server.http() as owner:
        for method, path in sorted(RULES):
            filled = re.sub(r"\{\w+\}", "nothing-of-this-name", path)
            body = (
                {"api_key": key, "password": WRONG_PASSWORD} if method in ("POST", "PATCH", "PUT") else None
            )
            wrong = {"authorization": f"Bearer {key}x"}
            for headers in (
                {},
                {"authorization": f"Basic {key}"},
                wrong,
                {"api-key": key},
                wrong | {"api-key": key},
            ):
                owner.request(method, f"{filled}?api_key={key}", json=body, headers=headers)


async def use_console(server: Server, link: str) -> dict[str, str]:
    """A person's passwords and sessions; returns the cookies, by name."""
    async with Browser(server.url) as first, Browser(server.url) as second:
        assert (await first.redeem(link, PASSWORD)).status_code == 303
        assert (await second.log_in("canary@example.org", WRONG_PASSWORD)).status_code != 303
        assert (await second.log_in(WRONG_PASSWORD, "canary@example.org")).status_code != 303
        assert (await second.log_in("canary@example.org", PASSWORD)).status_code == 303
        changed = await second.send(
            "/console/password", current=PASSWORD, password=SECOND_PASSWORD, repeat=SECOND_PASSWORD
        )
        assert changed.status_code == 303, changed.text
        every = [*first.cookies.items(), *second.cookies.items()]
    return {f"cookie {number} {name}": value for number, (name, value) in enumerate(every)}


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The commands below a group, by their words."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), name)
            assert below is not None
            yield from leaves(below, (*path, name))
    else:
        yield path


def run_every_command(server: Server, database: str) -> Iterator[tuple[str, str]]:
    """What each command says of this server, and of one whose database is away: most need more words."""
    left_out = {"serve", "demo", "engine", "bench", "simulate", "plugin", "whatif", "top"}
    away = database.replace(services.database_name(database), "no_such_database")
    for words in leaves(cli):
        if words[0] in left_out or words[-1] == "follow":
            continue
        for url in (database, away):
            where = ["--data-dir", str(server.data_dir), "--database-url", url]
            yield f"fairgate {' '.join(words)}", CliRunner().invoke(cli, [*words, *where]).output


def rows_of(url: str) -> Iterator[tuple[str, str]]:
    """The whole database as text, by table; bytes as hexadecimal digits."""
    with psycopg.connect(services.libpq_url(url)) as connection:
        tables = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        ).fetchall()
        for (table,) in tables:
            found = connection.execute(sql.SQL("SELECT t::text FROM {} t").format(sql.Identifier(table)))
            yield f"table {table}", "\n".join(text for (text,) in found)


def said_by(server: Server, database: str, redis_url: str) -> Iterator[tuple[str, str]]:
    """Everything that can be read of a server: what place it is, and its text."""
    for file in sorted(server.data_dir.rglob("*")):
        if file.is_file():
            yield file.name, file.read_bytes().decode("latin-1")
    for accept in ("text/plain", "application/openmetrics-text"):
        yield "/metrics", httpx.get(f"{server.url}/metrics", headers={"accept": accept}).text
    with server.http() as owner:
        for method, path in sorted(RULES):
            if method == "GET" and "{" not in path:
                yield path, owner.get(path).text
    for path, page in asyncio.run(crawled(server, "reader@example.org", "owner", [])).items():
        yield path, page
    yield from run_every_command(server, database)
    yield from rows_of(database)
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter("fairgate*"):
            yield "Redis", key.decode("latin-1") + (client.dump(key) or b"").decode("latin-1")


def shapes(secret: str) -> set[str]:
    """How it may be written."""
    raw = secret.encode()
    return {
        secret,
        raw.hex(),
        quote(secret, safe=""),
        base64.b64encode(raw).decode().rstrip("="),
        repr(secret),
    }


def test_no_secret_and_no_prompt_is_where_it_does_not_belong(
    talkative: Server, database: str, redis_server: str, collector: OtlpReceiver, receiver: Receiver
) -> None:
    server = talkative
    webhook = server.admin("POST", "/webhooks", {"url": f"{receiver.url}&{IN_URL}"})
    server.admin("POST", f"/webhooks/{webhook['id']}/test")
    server.admin("POST", "/tenants", {"name": "canary"})
    made = server.admin("POST", "/keys", {"tenant": "canary"})
    server.limit("canary", "output_tokens", 100, window="lifetime")
    use_inference(server, made["key"])
    rotated = server.admin("POST", f"/keys/{made['id']}/rotate")
    invited = server.admin("POST", "/people", {"name": "canary@example.org", "role": "operator"})
    link = invited["link"].partition("token=")[2]
    cookies = asyncio.run(use_console(server, link))
    ask_every_route(server, rotated["key"])
    until(server.is_idle)
    until(lambda: receiver.bodies and {each.service for each in collector.spans} == {"fairgate", ENGINE})
    kept = {
        path.name: path.read_text().strip() for path in server.data_dir.iterdir() if path.name in MAY_HOLD
    }
    secrets = {
        "prompt": PROMPT,
        "password": PASSWORD,
        "second password": SECOND_PASSWORD,
        "wrong password": WRONG_PASSWORD,
        "database password": DATABASE_PASSWORD,
        "key": made["key"],
        "rotated key": rotated["key"],
        "webhook's secret": webhook["secret"],
        "webhook's URL": IN_URL,
        "invitation": link,
        "owner key": server.owner_key,
        "pepper": kept["pepper"],
        "audit key": kept["audit-key"],
        "set-up link": kept["set-up-link"],
    } | cookies
    assert all(len(secret) >= 16 for secret in secrets.values()), secrets
    places, found = set(), set()
    sent = (("webhook", receiver.bodies), ("span", collector.bodies))
    told = [(place, body.decode("latin-1")) for place, bodies in sent for body in bodies]
    for place, text in (*told, *said_by(server, database, redis_server)):
        places.add(place)
        found |= {
            (place, name)
            for name, secret in secrets.items()
            if any(shape in text for shape in shapes(secret))
        }
    assert found == {(place, name) for place, names in MAY_HOLD.items() for name in names}
    assert {
        "fairgate audit export",
        "table ledger",
        "Redis",
        "/metrics",
        "/console/audit",
        "webhook",
        "span",
    } <= places, places
