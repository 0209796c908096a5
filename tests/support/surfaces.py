"""Writes what users see of the product as text files: `diff -ru` of two commits shows what has changed.

    python -m tests.support.surfaces OUT_DIR

The OpenAPI document, help and answers of commands, configuration documents, console pages and files of an
owner and of a member, answers of GET routes. The clock stands; what is random is replaced by `#`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx


class StandingClock:
    """Seconds since 1970, at first 2025-10-09, 12:20 UTC; goes on only where it is set."""

    now_s = 1_760_012_400.0

    def __call__(self) -> float:
        return self.now_s


NOW, DRAWN = StandingClock(), random.Random(0)
time.time = NOW  # before any module takes it for the default of a clock
secrets.choice = DRAWN.choice  # so that lists in the order of ids have one order

from ops.cli.main import cli  # noqa: E402
from tenants.storage.database import create_sql_engine  # noqa: E402
from tests.support.commands import run_command  # noqa: E402
from tests.support.config_files import FULL  # noqa: E402
from tests.support.console import Browser  # noqa: E402
from tests.support.console_questions import OBJECTS, QUESTIONS  # noqa: E402
from tests.support.every_list import ACTS, fill_counts  # noqa: E402
from tests.support.gateway_app import PEPPER, gateway_and_app  # noqa: E402
from tests.support.many_requests import Sizes, fill, fold_all  # noqa: E402
from tests.support.route_questions import questions  # noqa: E402

SIZES = Sizes(requests=1_000, tenants=3, keys=4)
MEASURED = ("/metrics", "/admin/v1/status", "/admin/v1/forecasts", "/readyz")
"""Routes whose numbers depend on the machine: of these the names alone."""
RANDOM = (
    (r"\b(?:gw_[0-9a-f]{12}|([a-z]{3})_[0-9A-Za-z]{16,})\b", r"\1_#"),
    (r"\bfg_live_[0-9A-Za-z]+(_[0-9A-Za-z_-]+)?", "fg_live_#"),
    (r'(name="form_token" value=")[^"]+', r"\1#"),
    (r"\b(cursor=)[^\"'&<> ]+", r"\1#"),
    (r'("next_cursor": )"[^"]+"', r'\1"#"'),
    (r"(token=)[A-Za-z0-9_-]{20,}", r"\1#"),
    (r'("(?:root|note|entry|public_key|etag|proof|secret)": )"[^"]+"', r'\1"#"'),
    (r"(/console/assets/[\w.-]+?)[.-][0-9a-f]{16}\.", r"\1.#."),
    (r"\b(?=\d*[a-f])[0-9a-f]{16,}\b", "#"),
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "#"),
    (r"'sha256-[^']+'", "'sha256-#'"),
)
ANSWERS = (
    *("tenant list", "tenant show t1", "project list", "key list", "limit list", "limit show lim_1"),
    *(
        "slo list",
        "slo report",
        "slo misses",
        "person list",
        "brake",
        "refusal list",
        "refusal counts",
        "flow show",
    ),
    *("flow engines", "audit list", "price list", "price history model-1", "usage show", "webhook list"),
    *("webhook deliveries whk_1", "policy show", "policy moves", "alerts list", "forecast calibration"),
    *("ledger show req_1", "request show req_1", "request list --ended", "export", "export --schema"),
    *("usage export --format csv", "usage sessions t1 run-1", "refusal list --tenant t1"),
)
CHANGED = FULL.replace("weight: 2", "weight: 3").replace("amount: 1000000,", "amount: 7,")


def main(out: Path) -> None:
    """Writes all of it below a new directory."""
    os.environ |= {"COLUMNS": "110", "NO_COLOR": "1"}
    logging.disable()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        surface = Surface(out, work)
        for path in commands(cli, []):
            surface.write(f"help/{'_'.join(['fairgate', *path])}", run_command(*path, "--help").output)
        surface.documents(work / "documents")
        data_dir = work / "data"
        filled(data_dir)
        asyncio.run(surface.served(data_dir))
        surface.answers(data_dir)


def commands(command: click.Command, path: list[str]) -> Iterator[list[str]]:
    """The words that each group and command is called by."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, [*path, name])


def filled(data_dir: Path) -> None:
    """A data directory with rows in every list."""
    data_dir.mkdir()
    (data_dir / "pepper").write_bytes(PEPPER)
    assert run_command("db", "upgrade", "--data-dir", str(data_dir)).exit_code == 0
    engine = create_sql_engine(f"sqlite:///{data_dir / 'fairgate.db'}", writing=True)
    with engine.begin() as connection:
        fill(connection, SIZES, round(NOW.now_s * 1e6))
        fill_counts(connection, round(NOW.now_s * 1e6))
    fold_all(engine)
    engine.dispose()


class Surface:
    """Files of one commit."""

    def __init__(self, out: Path, work: Path) -> None:
        self.out, self.work = out, work

    def write(self, name: str, text: str) -> None:
        """One file, without what is random."""
        text = text.replace(str(self.work), "WORK")
        for pattern, instead in RANDOM:
            text = re.sub(pattern, instead, text)
        path = self.out / re.sub(r"[^\w.,=&?/{}-]", "_", name.lstrip("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n")

    def said(self, name: str, *arguments: str, data_dir: Path) -> None:
        """The answer of a command."""
        DRAWN.seed(name)
        result = run_command(*arguments, "--data-dir", str(data_dir))
        self.write(name, f"exit {result.exit_code}\n{result.stdout}\n--- stderr\n{result.stderr}")

    def answers(self, data_dir: Path) -> None:
        """Of commands, as text and as JSON."""
        for command in ANSWERS:
            for form in ([], ["--json"]):
                words = [*command.split(), *form]
                self.said(f"commands/{'_'.join(words)}", *words, data_dir=data_dir)

    def documents(self, data_dir: Path) -> None:
        """A configuration with every kind of object: applied, exported, changed, planned."""
        assert run_command("db", "upgrade", "--data-dir", str(data_dir)).exit_code == 0
        full, changed = self.work / "full.yaml", self.work / "changed.yaml"
        full.write_text(FULL)
        changed.write_text(CHANGED)
        secret_file = ["--secrets-out", str(self.work / "secrets.json")]
        for name, words in (
            ("plan_of_all", ["diff", "-f", str(full)]),
            ("applied", ["apply", "-f", str(full), *secret_file]),
            ("exported", ["export"]),
            ("plan_of_nothing", ["diff", "-f", str(full)]),
            ("plan_of_changes", ["diff", "-f", str(changed)]),
            ("changed", ["apply", "-f", str(changed)]),
            ("audited", ["audit", "list"]),
        ):
            self.said(f"documents/{name}", *words, data_dir=data_dir)
            if words[0] != "apply":
                self.said(f"documents/{name}.json", *words, "--json", data_dir=data_dir)

    async def served(self, data_dir: Path) -> None:
        """Routes and pages of a gateway on the filled database."""
        url = f"sqlite:///{data_dir / 'fairgate.db'}"
        async with gateway_and_app(url, data_dir) as (client, app):
            self.write("openapi.json", pretty((await client.get("/openapi.json")).json()))
            for number, (method, path, body) in enumerate(ACTS):
                NOW.now_s += 1.0
                DRAWN.seed(number)
                answer = await client.request(method, f"/admin/v1{path}", json=body)
                self.write(f"made/{number:02}_{method}_{path}", shown(answer))
            for question in questions(round(NOW.now_s * 1e6)):
                answer = await client.get(question)
                self.write(f"routes/{question.rstrip('?')}.txt", shown(answer))
            for name, role in (("ada", "owner"), ("max", "member")):
                tenants = {"tenants": ["t1"]} if role == "member" else {}
                made = await client.post("/admin/v1/people", json={"name": name, "role": role} | tenants)
                async with Browser(app) as browser:
                    joined = await browser.redeem(made.json()["link"].partition("token=")[2])
                    assert joined.status_code == 303, joined.text
                    await self.pages(browser, role)

    async def pages(self, browser: Browser, role: str) -> None:
        """What one person sees. Streams have no end: of these the head."""
        for route, queries in QUESTIONS.items():
            for query in queries:
                path = route.format(**OBJECTS) + query
                page = await browser.http.request("HEAD" if route.endswith("/live") else "GET", path)
                self.write(f"console/{role}{path}.page", shown(page))


def pretty(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)


def names_in(value: Any) -> Any:
    """The same without its numbers, which a machine measured."""
    if isinstance(value, dict):
        return {name: names_in(part) for name, part in value.items()}
    if isinstance(value, list):
        return [names_in(part) for part in value]
    return "number" if isinstance(value, (int, float)) else value


def shown(answer: httpx.Response) -> str:
    """Status, the headers that clients read, and the body, a line an element."""
    kept = {"content-type", "content-disposition", "location", "link", "allow", "retry-after"}
    head = [f"{answer.status_code}"]
    head += [f"{name}: {answer.headers[name]}" for name in sorted(kept & {*answer.headers})]
    text = answer.text
    kind = answer.headers.get("content-type", "")
    is_measured = answer.request.url.path in MEASURED
    if kind.startswith("application/json"):
        text = pretty(names_in(answer.json()) if is_measured else answer.json())
    elif kind.startswith("text/html"):
        text = re.sub(r"\s*(<[^>]+>)\s*", r"\n\1\n", text)
        text = "\n".join(line for line in text.splitlines() if line.strip())
    elif is_measured:
        text = "\n".join(sorted(set(re.findall(r"^# HELP .*", text, re.M))))
    return "\n".join([*head, "", text])


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is one of the things that are random
        again = [sys.executable, "-m", "tests.support.surfaces", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | {"PYTHONHASHSEED": "0"})
    main(Path(sys.argv[1]))
