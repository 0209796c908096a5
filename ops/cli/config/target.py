"""Where configuration commands work: on the database of the data directory, or on a server by its URL.

Both give and take the same JSON.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import actor, administer
from ops.cli.base import Failure, served_resources, settings_now

if TYPE_CHECKING:
    from tenants.admin.admin import Admin
    from tenants.config_file.config_file import ConfigFile
    from tenants.config_file.yaml_reader import ConfigFileText

TIMEOUT_S = 120.0
MAX_KEY_FILE_BYTES = 4_096
FILE = click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The configuration file.",
)
MOST_UNNAMED = 50
"""Lines; `--json` has all."""


class Installed:
    def export(self) -> dict[str, Any]:
        """`GET /admin/v1/config`."""
        raise NotImplementedError

    def plan(self, file: ConfigFileText) -> dict[str, Any]:
        """`POST /admin/v1/config/plan`."""
        raise NotImplementedError

    def apply(self, file: ConfigFileText, etag: str, *, is_dry_run: bool) -> dict[str, Any]:
        """`POST /admin/v1/config/apply`, at the state of a plan."""
        raise NotImplementedError


def target_of(url: str | None, key_file: Path | None) -> Installed:
    """The server of `--url`, else the database."""
    if (url is None) != (key_file is None):
        raise click.UsageError("give --url and --key-file together, or neither: then it is the database")
    if url is None or key_file is None:
        return InstalledDatabase()
    return InstalledServer(url.rstrip("/"), read_key(key_file))


def read_key(key_file: Path) -> str:
    try:
        with key_file.open("rb") as opened:
            return opened.read(MAX_KEY_FILE_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds no API key"
        raise click.UsageError(f"--key-file {key_file} cannot be read: {why}") from None


class InstalledDatabase(Installed):
    def export(self) -> dict[str, Any]:
        async def act(file: ConfigFile) -> dict[str, Any]:
            return (await file.export()).as_json()

        return _administer(act)

    def plan(self, file: ConfigFileText) -> dict[str, Any]:
        async def act(directory: ConfigFile) -> dict[str, Any]:
            return (await directory.plan(file.wanted)).as_json()

        return _administer(act, file)

    def apply(self, file: ConfigFileText, etag: str, *, is_dry_run: bool) -> dict[str, Any]:
        async def act(directory: ConfigFile) -> dict[str, Any]:
            plan = await directory.plan(file.wanted, if_match=frozenset({etag}))
            keys = await directory.apply(actor(), plan, is_rehearsal=is_dry_run)
            return plan.as_json() | {"keys": [] if is_dry_run else [key.as_json() for key in keys]}

        return _administer(act, file)


def _administer(
    act: Callable[[ConfigFile], Awaitable[dict[str, Any]]], file: ConfigFileText | None = None
) -> dict[str, Any]:
    from gateway.cluster.policy_check import checked_policy
    from tenants.admin.platform.policy import StoredPolicy
    from tenants.config_file.base import ConfigInvalid
    from tenants.config_file.config_file import ConfigFile
    from tenants.config_file.plan import PlanTerms
    from tenants.errors import PreconditionFailed
    from tenants.storage.database import open_database

    settings = settings_now()
    policy = settings.policy
    terms = PlanTerms(
        settings.tier_multipliers,
        StoredPolicy(policy.name, policy.options.changed()),
        lambda wanted: checked_policy(wanted, policy.options),
        served_resources(),
    )

    async def run(admin: Admin) -> dict[str, Any]:
        database = open_database(settings.resolved_database_url)
        try:
            return await act(ConfigFile(database, admin, terms))
        except ConfigInvalid as error:
            raise Failure(str(error if file is None else file.bad(error))) from None
        except PreconditionFailed:
            raise Failure(
                "the directory was changed after the plan was made, and nothing was done: run it again"
            ) from None
        finally:
            await database.close()

    return administer(run)


class InstalledServer(Installed):
    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._key = key

    def export(self) -> dict[str, Any]:
        return self._call("GET", "")

    def plan(self, file: ConfigFileText) -> dict[str, Any]:
        return self._call("POST", "/plan", file)

    def apply(self, file: ConfigFileText, etag: str, *, is_dry_run: bool) -> dict[str, Any]:
        return self._call("POST", f"/apply?dry_run={str(is_dry_run).lower()}", file, etag)

    def _call(
        self, method: str, path: str, file: ConfigFileText | None = None, etag: str = ""
    ) -> dict[str, Any]:
        import httpx
        import msgspec

        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        if etag:
            headers["if-match"] = f'"{etag}"'
        try:
            response = httpx.request(
                method,
                f"{self._url}/admin/v1/config{path}",
                headers=headers,
                content=None if file is None else msgspec.json.encode(file.wanted),
                timeout=TIMEOUT_S,
            )
            answered = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            is_open = etag and not isinstance(error, httpx.ConnectError | httpx.InvalidURL)
            advice = "; it may have been applied all the same: look with `fairgate diff`" if is_open else ""
            raise Failure(
                f"the server at {self._url} does not answer: {str(error).rstrip('.')}{advice}"
            ) from None
        except ValueError:
            raise Failure(f"{self._url} answered without JSON: is this a Fairgate server?") from None
        match answered:
            case {"error": {"message": str()} as refused} if response.is_error:
                raise Failure(_refusal(refused, file))
            case {"object": "config" | "config.plan"} if response.is_success:
                return dict(answered)
        raise Failure(f"{self._url} answered {response.status_code}, and not as a Fairgate server does")


def _refusal(error: dict[str, Any], file: ConfigFileText | None) -> str:
    """What the server refuses, with the line of the file where the error names a place."""
    from tenants.config_file.base import as_text, place_of

    message, place = str(error["message"]), place_of(str(error.get("param") or ""))
    if file is None or not place or place[0] not in file.lines.inside:
        return message
    named = as_text(place)
    if message.lower().startswith(named.lower()):
        message = named + message[len(named) :]  # the API begins its sentences with a capital letter
    return f"line {file.lines.of(place)}: {message}"


def read_config(path: Path) -> ConfigFileText:
    """The file of `--file`. A failure says line and key."""
    from tenants.config_file.yaml_reader import MAX_FILE_BYTES, BadFile, read_file

    try:
        with path.open("rb") as opened:
            return read_file(opened.read(MAX_FILE_BYTES + 1), served_resources())
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}") from None
    except BadFile as error:
        raise Failure(f"{path}: {error}") from None


def remote_options(command: Callable[..., Any]) -> Callable[..., Any]:
    key_file = click.option(
        "--key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with an admin key for that server.",
    )
    url = click.option("--url", metavar="URL", help="A server's address.  [default: the database itself]")
    return url(key_file(command))


def show_plan(plan: Mapping[str, Any]) -> None:
    """One line for each step, below it what changes, and at the end what the file does not name."""
    for step in plan["steps"]:
        click.echo(f"{step['act']:<20} {step['subject']}")
        for name, pair in step["changes"].items():
            click.echo(f"    {name}: {_value(pair['before'])} -> {_value(pair['after'])}")
    if not plan["steps"]:
        click.echo("no changes")
    unnamed = plan["unnamed"]
    for name in unnamed[:MOST_UNNAMED]:
        click.echo(f"not in the file: {name}")
    if len(unnamed) > MOST_UNNAMED:
        click.echo(f"not in the file: {len(unnamed) - MOST_UNNAMED} more")


def _value(value: Any) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
