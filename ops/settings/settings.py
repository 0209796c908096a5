"""Settings of a Fairgate process, and how flags, environment and file give them.

Flags win over the environment (`FAIRGATE_*`), that over one TOML file, that over the defaults. A field's
annotation holds its type, bounds and meaning; parsers, flags, variables, TOML keys and documentation are
derived from it. An unknown name or value stops the start. Of a secret `FAIRGATE_X_FILE` may name the file.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from msgspec import Meta

from engine.process.options import EngineSettings
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import CHOICES
from gateway.config import AuditSettings, GatewaySettings
from gateway.upstream.openai.config import UpstreamSettings
from ops.settings import upstreams as upstream_settings
from ops.settings import values
from ops.settings.groups import AdminSettings, PolicySettings, Templated, templated
from ops.settings.telemetry import TelemetrySettings
from ops.settings.upstreams import EngineEntry
from tenants.nouns.alias import Alias
from tenants.pricing.pricing import DEFAULT_MULTIPLIERS, Price
from tenants.types import Tier

SHIPPED_MODEL = Path(__file__).parents[1] / "demo" / "model"
SHIPPED_MODEL_NAME = "fairgate-demo"
SHIPPED_PRICE = Price(input_nanousd=150, output_nanousd=600, cached_input_nanousd=75)
"""0.15 dollars a million input tokens, 0.60 a million output tokens."""
TIER_PRICES = {tier.value: thousandths for tier, thousandths in DEFAULT_MULTIPLIERS.items()}
ENVIRONMENT_PREFIX = "FAIRGATE_"
IGNORED_PREFIX = "FAIRGATE_TEST_"
"""Variables of the test suite; no setting is ever called so."""
PLUGIN_PREFIX = "FAIRGATE_VLLM_"
"""Variables of the plug-in inside vLLM, which reads them itself; no setting is ever called so."""
CONFIG_VARIABLE = "FAIRGATE_CONFIG"
FILE_SUFFIX = "_FILE"
"""Of a variable that names the file with a secret, as containers get theirs."""
MOST_SECRET_BYTES = 16_384
POLICY_OPTIONS = "policy.options"
POLICY_OPTION_FLAG = "--policy-option"
OTHER_FLAGS = {
    "policy.name": "--policy",
    "policy.template": "--template",
    "policy.table": "--policy-table",
    "policy.learned_table": "--policy-learned-table",
    "engines": "--engine-list",
}
"""Flags that are not called as the settings are; other options of the policy share `POLICY_OPTION_FLAG`."""
OLDER_KEYS = {"policy": "policy.name", "policy_table": "policy.table"}
"""Keys of the file from before the table [policy]."""
OLDER_POLICY = re.compile(r"^\s*policy\s*=", re.MULTILINE)
POLICY_TABLE = re.compile(r"^\s*(\[\s*policy\s*\]|policy\s*\.)", re.MULTILINE)


MOST_WORKERS = 64
HUB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"


def is_hub_id(model: Path) -> bool:
    """Whether it names a model on the Hugging Face hub; a directory of that name goes first."""
    return re.fullmatch(HUB_ID, str(model)) is not None and not model.is_dir()


class BadSetting(Exception):
    """A setting that stops the start; the message names it, its source and what is accepted."""


@dataclass(frozen=True)
class Settings:
    """All settings of one Fairgate process. Paths are as given; `load` makes `data_dir` absolute."""

    host: Annotated[
        str,
        Meta(title="a host name or address", pattern=r"[A-Za-z0-9.:_%\[\]-]{1,255}"),
        "Address that the gateway listens on.",
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535), "Port of the gateway; 0 takes a free one."] = 8000
    workers: Annotated[
        int,
        Meta(ge=1, le=MOST_WORKERS),
        "Gateway processes that share the port; more than 1 need PostgreSQL and Redis.",
    ] = 1
    data_dir: Annotated[Path, "Directory of the database, the secrets and the engine's files."] = Path(
        "fairgate-data"
    )
    model: Annotated[
        Path,
        "Model directory, or the id of a model on the Hugging Face hub (organisation/name): from the local"
        " cache, else downloaded (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN); the default is the small model that"
        " ships with it.",
    ] = SHIPPED_MODEL
    revision: Annotated[
        str,
        Meta(title="a branch, a tag or a commit", pattern=r"([A-Za-z0-9][A-Za-z0-9._/-]{0,127})?"),
        "Revision of a model that is named by its id; the default is the main branch.",
    ] = ""
    model_name: Annotated[
        str,
        Meta(title="1 to 128 letters, digits and . _ : / -", pattern=r"[A-Za-z0-9._:/-]{0,128}"),
        f"Name of the model in the API; the default is its id, or the directory's name ({SHIPPED_MODEL_NAME}"
        " for the shipped one).",
    ] = ""
    database_url: Annotated[
        str,
        values.url(
            "sqlite", "postgresql", "postgres", "postgresql+psycopg", example="postgresql://user@host/db"
        ),
        "Database; the default is SQLite in the data directory.",
    ] = field(default="", repr=False)
    redis_url: Annotated[
        str,
        values.redis_url(),
        "Redis that holds the quota counters: a server, a Redis Cluster (redis+cluster://HOST:PORT,HOST:PORT)"
        " or what Sentinels watch (redis+sentinel://HOST:PORT,HOST:PORT/SERVICE); the default keeps them in"
        " the process.",
    ] = field(default="", repr=False)
    prices: Annotated[
        dict[str, Price],
        values.prices(),
        f"Price of each model; the default is {SHIPPED_MODEL_NAME}="
        f"{SHIPPED_PRICE.input_nanousd}/{SHIPPED_PRICE.output_nanousd}/{SHIPPED_PRICE.cached_input_nanousd}"
        " for the shipped model. What the price book knows already stays as it is there; a model without "
        "any price is refused, MODEL=0/0 is free.",
    ] = field(default_factory=dict)
    tier_prices: Annotated[
        dict[str, int],
        values.multipliers(tuple(TIER_PRICES)),
        "What a tier multiplies the price by, in thousandths, of models priced from now on.",
    ] = field(default_factory=lambda: dict(TIER_PRICES))
    upstreams: Annotated[
        tuple[UpstreamSettings, ...],
        upstream_settings.upstreams(),
        "Servers that run models here and speak OpenAI's API: vLLM, SGLang, TensorRT-LLM, another Fairgate.",
    ] = ()
    engines: Annotated[
        tuple[EngineEntry, ...],
        upstream_settings.engines(),
        "Engines of this model that run elsewhere (`fairgate engine --address --engine-id`), each with a name"
        " of its own; more are looked up by `engine.discover`.",
    ] = ()
    aliases: Annotated[
        dict[str, Alias],
        upstream_settings.aliases(),
        "Other names of models, each for one or several of them by weight, or for a chain: the next model"
        " takes what the one before it cannot, where it is at most `max_price` (1) times as dear as the"
        " first.",
    ] = field(default_factory=dict)
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "How much the log on stderr says."] = (
        "info"
    )
    log_format: Annotated[
        Literal["text", "json"],
        "Lines of the log: text for people, or JSON objects. Both have the ids of request, trace and tenant.",
    ] = "text"
    pepper: Annotated[
        str,
        Meta(title="at least 32 characters without spaces", pattern=r"(\S{32,1024})?"),
        "Secret that keys are hashed with; the default is the file pepper in the data directory.",
    ] = field(default="", repr=False)
    policy: PolicySettings = field(default_factory=PolicySettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    admin: AdminSettings = field(default_factory=AdminSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    given: Mapping[str, str] = field(default_factory=dict)
    """Of the settings that flags, environment or file set: by name, which of these did, in words."""

    @property
    def served_model_name(self) -> str:
        if not self.engine.serve and self.upstreams:
            return self.upstreams[0].pool_name
        if self.model_name:
            return self.model_name
        if self.model.resolve() == SHIPPED_MODEL.resolve():
            return SHIPPED_MODEL_NAME
        if is_hub_id(self.model):
            return str(self.model)
        return self.model.resolve().name

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Every served model, our own engine's first."""
        own = (self.served_model_name,) if self.engine.serve else ()
        return tuple(dict.fromkeys((*own, *(upstream.pool_name for upstream in self.upstreams))))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that a model has in the API, aliases last."""
        return (*self.pool_names, *self.aliases)

    @property
    def resolved_database_url(self) -> str:
        """The database, SQLite in the data directory unless set; PostgreSQL always through psycopg."""
        if not self.database_url:
            return f"sqlite:///{self.data_dir / 'fairgate.db'}"
        scheme, _, rest = self.database_url.partition("://")
        return f"postgresql+psycopg://{rest}" if scheme in ("postgresql", "postgres") else self.database_url

    @property
    def model_prices(self) -> dict[str, Price]:
        """Prices by model name: those that were set, and the shipped model's. Any other has none: a model is
        free only where a setting says so."""
        is_shipped = self.engine.serve and self.model.resolve() == SHIPPED_MODEL.resolve()
        return ({self.served_model_name: SHIPPED_PRICE} if is_shipped else {}) | self.prices

    def templated(self, context_tokens: int) -> Settings:
        """With what the template sets for a model of this length, where nothing else was set. Raises
        `BadSetting`."""
        if not self.policy.template:
            return self
        try:
            chosen: Templated = templated(self.policy, self.engine, self.given, context_tokens)
        except ValueError as error:
            raise BadSetting(f"setting policy.template: {error}") from None
        return replace(self, policy=chosen.policy, engine=chosen.engine)

    def require_shared_stores(self) -> None:
        """Raises `BadSetting` where several workers would each count for themselves."""
        lacking = [] if self.database_url.startswith("postgres") else ["PostgreSQL (set database_url)"]
        lacking += [] if self.redis_url else ["Redis (set redis_url)"]
        if self.workers > 1 and lacking:
            raise BadSetting(
                f"setting workers: {self.workers} workers share limits and ledger, and need"
                f" {' and '.join(lacking)}; or leave workers at 1"
            )

    @property
    def tier_multipliers(self) -> dict[Tier, int]:
        """`tier_prices` by tier."""
        return {Tier(name): multiplier for name, multiplier in self.tier_prices.items()}


@dataclass(frozen=True)
class SettingInfo:
    name: str
    """`port`, or `engine.threads`."""
    group: str
    """`engine`, `gateway`, `admin`, `audit`, `telemetry`, `policy`, `policy.options`, or empty."""
    field: str
    """Its attribute in the group's struct."""
    kind: values.ValueKind[Any]
    default: Any
    help: str
    secret: bool
    """Its value is kept out of every message."""

    @property
    def flag(self) -> str:
        if self.name in OTHER_FLAGS:
            return OTHER_FLAGS[self.name]
        if self.group == POLICY_OPTIONS:
            return f"{POLICY_OPTION_FLAG} {self.field}"
        return "--" + self.name.replace(".", "-").replace("_", "-")

    @property
    def variable(self) -> str:
        if self.name == "policy.name":
            return ENVIRONMENT_PREFIX + "POLICY"
        return _variable(self.name)

    @property
    def default_text(self) -> str:
        """The default as a setting's text; empty where it is derived."""
        is_derived = self.default == SHIPPED_MODEL or self.default in ((), {}, None, "")
        return "" if is_derived else self.kind.shown(self.default)


def _variable(name: str) -> str:
    """`FAIRGATE_ENGINE_THREADS` of `engine.threads`."""
    return ENVIRONMENT_PREFIX + name.replace(".", "_").upper()


def _rows(settings: object, group: str = "") -> list[SettingInfo]:
    cls = type(settings)
    names = dict(
        zip(getattr(cls, "__struct_fields__", ()), getattr(cls, "__struct_encode_fields__", ()), strict=True)
    )
    secrets = {item.name for item in fields(Settings) if not item.repr} if cls is Settings else set()
    rows: list[SettingInfo] = []
    for attribute, hint in get_type_hints(cls, include_extras=True).items():
        default = getattr(settings, attribute)
        if get_origin(hint) is Annotated:
            prefix = group.partition(".")[0]
            name = f"{prefix}{'.' if prefix else ''}{names.get(attribute, attribute)}"
            [help_text] = [mark for mark in hint.__metadata__ if isinstance(mark, str)]
            rows.append(
                SettingInfo(
                    name, group, attribute, _kind(name, hint), default, help_text, attribute in secrets
                )
            )
        else:
            rows += _rows(default, f"{group}{'.' if group else ''}{attribute}")
    return rows


def _kind(name: str, hint: Any) -> values.ValueKind[Any]:
    choices = CHOICES.get(name.removeprefix("policy."))
    return values.kind_of(hint) if choices is None else values.word(*sorted(choices))


SETTINGS: tuple[SettingInfo, ...] = tuple(_rows(Settings()))


def load(
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Settings:
    """Settings from flags (by setting name; None: not given), environment and file.

    Raises `BadSetting` for anything unknown or unparsable, wherever it stands.
    """
    environment = environment or {}
    if config_file is None and environment.get(CONFIG_VARIABLE):
        config_file = Path(environment[CONFIG_VARIABLE])
    raw: dict[str, tuple[str, str]] = {}
    if config_file is not None:
        raw |= _from_file(config_file)
    raw |= _from_environment(environment)
    for name, value in (flags or {}).items():
        if value is not None:
            raw[name] = (_as_text(value), f"flag {_info(name).flag}")
    parsed: dict[str, dict[str, Any]] = {
        "": {},
        "engine": {},
        "gateway": {},
        "admin": {},
        "audit": {},
        "telemetry": {},
        "policy": {},
        POLICY_OPTIONS: {},
    }
    for name, (text, source) in raw.items():
        row = _info(name)
        parsed[row.group][row.field] = _parse(row, text, source)
    for name in ("table", "learned_table"):
        if table := parsed[POLICY_OPTIONS].get(name):
            parsed[POLICY_OPTIONS][name] = str(Path(table).expanduser().absolute())
    try:
        options = PolicyOptions(**parsed[POLICY_OPTIONS])
    except ValueError as error:
        raise BadSetting(f"settings of the policy: {error}") from None
    settings = Settings(
        **parsed[""],
        given={name: source for name, (_, source) in raw.items()},
        policy=PolicySettings(**parsed["policy"], options=options),
        engine=EngineSettings(**parsed["engine"]),
        gateway=GatewaySettings(**parsed["gateway"]),
        admin=AdminSettings(**parsed["admin"]),
        audit=AuditSettings(**parsed["audit"]),
        telemetry=TelemetrySettings(**parsed["telemetry"]),
    )
    return replace(
        settings,
        data_dir=settings.data_dir.absolute(),
        model=settings.model if is_hub_id(settings.model) else settings.model.absolute(),
        tier_prices=TIER_PRICES | settings.tier_prices,
    )


def _info(name: str) -> SettingInfo:
    for row in SETTINGS:
        if row.name == name:
            return row
    raise BadSetting(f"unknown setting {name!r}{_nearest(name, [row.name for row in SETTINGS])}")


def _parse(row: SettingInfo, text: str, source: str) -> Any:
    try:
        return row.kind(text)
    except ValueError as error:
        shown = "its value" if row.secret else repr(text)
        raise BadSetting(
            f"setting {row.name} ({source}): {shown} is not accepted; it takes {error}"
        ) from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    by_variable = {row.variable: row for row in SETTINGS}
    by_file = {row.variable + FILE_SUFFIX: row for row in SETTINGS if row.secret}
    texts: dict[str, tuple[str, str]] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable.startswith((IGNORED_PREFIX, PLUGIN_PREFIX)):
            continue
        if variable == CONFIG_VARIABLE:
            continue
        if (row := by_file.get(variable)) is not None:
            if row.variable in environment:
                raise BadSetting(
                    f"setting {row.name}: {row.variable} and {variable} are both set; leave one out"
                )
            texts[row.name] = (_secret_in(Path(text), variable), f"file {text} of {variable}")
            continue
        if variable not in by_variable:
            # A setting whose variable is called otherwise is looked for by its own name, too.
            named = {_variable(row.name): row.variable for row in SETTINGS} | {
                name: name for name in by_variable
            }
            nearest = _nearest(variable, named, called=named)
            raise BadSetting(f"unknown setting: environment variable {variable}{nearest}")
        texts[by_variable[variable].name] = (text, f"environment variable {variable}")
    return texts


def _secret_in(path: Path, variable: str) -> str:
    try:
        with path.open("rb") as file:
            secret = file.read(MOST_SECRET_BYTES + 1).decode().strip()
    except OSError as error:
        raise BadSetting(f"file {path} of {variable} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadSetting(f"file {path} of {variable} is not text in UTF-8") from None
    # An empty one would mean the default: another database, other keys.
    if not secret or len(secret) > MOST_SECRET_BYTES:
        raise BadSetting(
            f"file {path} of {variable} must hold 1 to {MOST_SECRET_BYTES} bytes, the value alone"
        )
    return secret


def _from_file(config_file: Path) -> dict[str, tuple[str, str]]:
    text = ""
    try:
        text = config_file.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise BadSetting(f"config file {config_file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # A key that is a value and a table: TOML's own words for it name neither.
        if OLDER_POLICY.search(text.partition("\n[")[0]) and POLICY_TABLE.search(text):
            raise BadSetting(
                f"config file {config_file} has the table [policy] and the older key policy: move it there,"
                " as `name = ...`"
            ) from None
        raise BadSetting(f"config file {config_file} is not TOML: {error}") from None
    known = {row.name for row in SETTINGS}
    groups = {name.partition(".")[0] for name in known if "." in name}
    texts: dict[str, tuple[str, str]] = {}
    if "policy_table" in document and isinstance(document.get("policy"), dict):
        raise BadSetting(
            f"config file {config_file} has the table [policy] and the older key policy_table: move it there,"
            f" as `table = {document['policy_table']!r}`"
        )
    for older, name in OLDER_KEYS.items():
        if isinstance(document.get(older), str):
            texts[name] = (document.pop(older), f"file {config_file}, key {older}")
    for key, value in document.items():
        items = (
            {f"{key}.{inner}": item for inner, item in value.items()}
            if key in groups and isinstance(value, dict)
            else {key: value}
        )
        for name, item in items.items():
            source = f"file {config_file}, key {name}"
            if name not in known:
                raise BadSetting(f"unknown setting: {source}{_nearest(name, known)}")
            texts[name] = (_as_text(item), source)
    return texts


def _nearest(name: str, known: Iterable[str], called: Mapping[str, str] | None = None) -> str:
    """A hint at the most similar of `known`; `called`: what to call it."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    if not matches:
        return "; `fairgate serve --help-all` lists all settings"
    return f" (did you mean {(called or {}).get(matches[0], matches[0])}?)"


def _is_nested(value: object) -> bool:
    """Tables within a table or a list: more than commas can say."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(item, Mapping) for item in inner)


def _as_text(value: object) -> str:
    """One textual form for flags and TOML: lists and tables become comma-separated items, nested ones
    JSON."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if _is_nested(value):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_as_text(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ",".join(_as_text(item) for item in value)
    return str(value)
