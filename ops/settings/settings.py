"""Which settings does Fairgate have, what may they say, and which source wins?

Flags win over the environment (`FAIRGATE_*`), the environment over one TOML file, that over the defaults.
`SETTINGS` is the one table: flags, variable names, TOML keys and documentation are derived from it. The
environment is read once, here; a name or a value that is not understood stops the start.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.scheduling.policy import POLICIES, TABLE_POLICIES
from ops.settings import upstreams as upstream_settings
from ops.settings import values
from ops.settings.upstreams import UpstreamSettings
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
CONFIG_VARIABLE = "FAIRGATE_CONFIG"


class BadSetting(Exception):
    """A setting that stops the start; the message names it, its source and what is accepted."""


def about(kind: values.ValueKind[Any], help_text: str, *, secret: bool = False) -> dict[str, Any]:
    """What the table says of a setting; `secret` keeps its value out of every message."""
    return {"kind": kind, "help": help_text, "secret": secret}


@dataclass(frozen=True)
class EngineSettings:
    """The engine that `serve` starts and supervises, or the one that it is told to share."""

    serve: str = field(
        default="yes",
        metadata=about(
            values.word("yes", "no"),
            "Whether a model is served by an engine of our own; no: only by the upstreams.",
        ),
    )
    address: str = field(
        default="",
        metadata=about(
            values.text_of("an address like ipc:///run/fairgate/engine.sock", r"((ipc|tcp)://\S{1,200})?"),
            "Address of an engine that runs already (`fairgate engine --address`), to share it with other"
            " gateways; the default starts one.",
        ),
    )
    device: str = field(
        default="auto",
        metadata=about(
            values.text_of("auto, cpu, cuda or cuda:N", r"auto|cpu|cuda(:\d+)?"),
            "Device that computes; auto takes a CUDA device where there is one.",
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=about(
            values.word("auto", "float32", "bfloat16", "float16"),
            "Number format; auto is float32 on a CPU and the model's own on a GPU.",
        ),
    )
    threads: int = field(
        default=0,
        metadata=about(values.integer(0, 1024), "CPU threads of the engine; 0 takes half of the cores."),
    )
    kv_blocks: int = field(
        default=0,
        metadata=about(
            values.integer(0, 10_000_000), "Blocks of the KV cache; 0 derives them from kv_memory."
        ),
    )
    kv_memory: int = field(
        default=256 * 2**20,
        metadata=about(values.size_bytes(2**20, 2**41), "Memory of the KV cache, where kv_blocks is 0."),
    )
    host_kv_blocks: int = field(
        default=0,
        metadata=about(
            values.integer(0, 10_000_000),
            "Blocks of host memory for the keys and values of sequences that give way; 0: they are computed"
            " again.",
        ),
    )
    block_tokens: int = field(
        default=16, metadata=about(values.integer(1, 256), "Tokens in one block of the KV cache.")
    )
    max_sequences: int = field(
        default=32, metadata=about(values.integer(1, 4096), "Most sequences that run at once.")
    )
    max_batched_tokens: int = field(
        default=512,
        metadata=about(values.integer(16, 131_072), "Most tokens that one step computes: the token budget."),
    )
    niceness: int = field(
        default=0,
        metadata=about(
            values.integer(0, 19),
            "How far the engine stands back for gateway and clients on the same cores; 0: it does not.",
        ),
    )
    collect_lengths: str = field(
        default="no",
        metadata=about(
            values.word("yes", "no"),
            "Whether the engine keeps readings of the model's state and the lengths that followed, for"
            " `fairgate forecast train`. No text, but derived from prompts; readable by the owner only.",
        ),
    )
    orphan_s: float = field(
        default=60.0,
        metadata=about(
            values.seconds(1, 3600), "An engine that hears no gateway for so long saves and exits."
        ),
    )


@dataclass(frozen=True)
class GatewaySettings:
    """The HTTP face and its queue."""

    body_limit: int = field(
        default=2**20,
        metadata=about(
            values.size_bytes(1024, 2**30), "Largest request body; a larger one is refused with 413."
        ),
    )
    max_queued: int = field(
        default=2048,
        metadata=about(
            values.integer(1, 1_000_000), "Most requests that wait in the queue, all tenants together."
        ),
    )
    max_queued_per_tenant: int = field(
        default=512,
        metadata=about(values.integer(1, 1_000_000), "Most requests of one tenant that wait in the queue."),
    )
    ttl_interactive: float = field(
        default=120.0,
        metadata=about(values.seconds(0.1, 86_400), "Longest wait in the queue, tier interactive."),
    )
    ttl_standard: float = field(
        default=300.0,
        metadata=about(values.seconds(0.1, 86_400), "Longest wait in the queue, tier standard."),
    )
    ttl_batch: float = field(
        default=540.0, metadata=about(values.seconds(0.1, 604_800), "Longest wait in the queue, tier batch.")
    )
    queue: str = field(
        default="shared",
        metadata=about(
            values.word("shared", "own"),
            "Whether gateways with the same Redis and the same engines share the queue in front of them, so"
            " that together they are as fair as one; own: each is fair by itself only.",
        ),
    )
    ageing_standard: float = field(
        default=150.0,
        metadata=about(
            values.seconds(0, 604_800),
            "A request of tier standard that waited so long goes as an interactive one; 0: it never does.",
        ),
    )
    ageing_batch: float = field(
        default=180.0,
        metadata=about(
            values.seconds(0, 604_800),
            "A batch request that has waited so long goes as a standard one, and after as long again as an"
            " interactive one; 0: it never does.",
        ),
    )
    long_tokens: int = field(
        default=16_384,
        metadata=about(
            values.integer(1, 100_000_000),
            "Requests with more tokens than this (input and predicted output) wait in a lane of their own, so"
            " that they never hold up the others.",
        ),
    )
    long_share_sequences: int = field(
        default=50,
        metadata=about(
            values.integer(1, 100),
            "Per cent of an engine's sequences that long requests of a tier and those above may hold.",
        ),
    )
    long_share_kv: int = field(
        default=50,
        metadata=about(
            values.integer(1, 100),
            "Per cent of an engine's KV cache that long requests of a tier and those above may hold.",
        ),
    )
    batch_share: int = field(
        default=100,
        metadata=about(
            values.integer(1, 100),
            "Per cent of an engine's sequences and KV cache that the batch tier may hold.",
        ),
    )
    control: str = field(
        default="off",
        metadata=about(
            values.word("off", "advice", "acting"),
            "Control loop over queue, engines and admission: off, advice (only logged), or acting.",
        ),
    )
    estimates: str = field(
        default="yes",
        metadata=about(
            values.word("yes", "no"),
            "Whether requests are told what they will probably wait, take and cost; no: nobody is, nothing is"
            " quoted, and no deadline is refused early.",
        ),
    )
    quote_valid: float = field(
        default=10.0,
        metadata=about(values.seconds(0.1, 3600), "For so long a quote can be redeemed."),
    )
    quote_credit: int = field(
        default=50,
        metadata=about(
            values.integer(0, 100),
            "Per cent of the charge that is credited where a redeemed quote was not kept and that is ours.",
        ),
    )
    reservation_burst: float = field(
        default=10.0,
        metadata=about(
            values.seconds(0, 3600),
            "A tenant that was kept from its reserved tokens per second is owed at most those of so many"
            " seconds.",
        ),
    )
    stale: float = field(
        default=15.0,
        metadata=about(
            values.seconds(3, 3600),
            "A gateway that has been silent for so long is taken for dead: others that share its database and"
            " engine settle what it left.",
        ),
    )
    lease: float = field(
        default=60.0,
        metadata=about(
            values.seconds(1, 3600),
            "How long the quota store keeps what a silent gateway holds before anybody looks after it.",
        ),
    )
    store_failure: str = field(
        default="closed",
        metadata=about(
            values.word("closed", "local"),
            "What happens while Redis cannot be reached: closed refuses every request, local admits within a"
            " slice of each limit that each gateway counts for itself.",
        ),
    )
    local_slice: int = field(
        default=10,
        metadata=about(
            values.integer(1, 100),
            "Per cent of each limit that one gateway may give out while Redis cannot be reached, where"
            " store_failure is local; a hard limit is exceeded by at most so much for each gateway.",
        ),
    )
    idempotency_ttl: float = field(
        default=86_400.0,
        metadata=about(
            values.seconds(0, 30 * 86_400),
            "How long answers to requests with an Idempotency-Key are kept; 0: such requests are refused.",
        ),
    )
    reserve_percent: int = field(
        default=90,
        metadata=about(
            values.integer(1, 100),
            "What a request holds before it runs is enough for so many of 100 answers, by the forecast of"
            " their length; more is held while it decodes.",
        ),
    )
    slow_reader: float = field(
        default=30.0,
        metadata=about(
            values.seconds(0.1, 3600),
            "A client that reads nothing of its stream for so long, while more waits for it, is cut.",
        ),
    )
    max_buffered_events: int = field(
        default=512,
        metadata=about(
            values.integer(1, 100_000),
            "Pieces of a stream that wait for a client which does not read; then the engine rests.",
        ),
    )
    timeline_days: int = field(
        default=7,
        metadata=about(
            values.integer(0, 3650),
            "Days for which the timelines of requests that have ended are kept (numbers, no text); 0: none"
            " is.",
        ),
    )
    max_timelines: int = field(
        default=1_000_000,
        metadata=about(
            values.integer(1, 1_000_000_000), "Most timelines that are kept; the oldest go first."
        ),
    )
    drain: float = field(
        default=20.0,
        metadata=about(
            values.seconds(0, 3600), "On SIGTERM: how long running requests may still take to end."
        ),
    )


@dataclass(frozen=True)
class Settings:
    """All settings of one Fairgate process. Paths are as given; `load` makes `data_dir` absolute."""

    host: str = field(
        default="127.0.0.1",
        metadata=about(
            values.text_of("a host name or address", r"[A-Za-z0-9.:_%\[\]-]{1,255}"),
            "Address that the gateway listens on.",
        ),
    )
    port: int = field(
        default=8000, metadata=about(values.integer(0, 65_535), "Port of the gateway; 0 takes a free one.")
    )
    data_dir: Path = field(
        default=Path("fairgate-data"),
        metadata=about(values.path(), "Directory of the database, the secrets and the engine's files."),
    )
    model: Path = field(
        default=SHIPPED_MODEL,
        metadata=about(values.path(), "Model directory; the default is the small model that ships with it."),
    )
    model_name: str = field(
        default="",
        metadata=about(
            values.text_of("1 to 128 letters, digits and . _ : / -", r"[A-Za-z0-9._:/-]{0,128}"),
            "Name of the model in the API; the default is the directory's name"
            f" ({SHIPPED_MODEL_NAME} for the shipped one).",
        ),
    )
    database_url: str = field(
        default="",
        repr=False,
        metadata=about(
            values.url(
                "sqlite", "postgresql", "postgres", "postgresql+psycopg", example="postgresql://user@host/db"
            ),
            "Database; the default is SQLite in the data directory.",
            secret=True,
        ),
    )
    redis_url: str = field(
        default="",
        repr=False,
        metadata=about(
            values.url("redis", "rediss", "unix", example="redis://127.0.0.1:6379/0"),
            "Redis that holds the quota counters; the default keeps them in the process.",
            secret=True,
        ),
    )
    policy: str = field(
        default="vtc",
        metadata=about(
            values.word(*sorted(POLICIES | TABLE_POLICIES)), "Scheduling policy of queue and engine."
        ),
    )
    policy_table: str = field(
        default="",
        metadata=about(
            values.text_of("a path", r"[^\0]{0,4096}"),
            "File with a batch-or-wait table (`fairgate policy solve`), which the policy table looks up; an"
            " engine that is shared needs the same.",
        ),
    )
    prices: dict[str, Price] = field(
        default_factory=dict,
        metadata=about(
            values.prices(),
            f"Price of each model; the default is {SHIPPED_MODEL_NAME}="
            f"{SHIPPED_PRICE.input_nanousd}/{SHIPPED_PRICE.output_nanousd}/{SHIPPED_PRICE.cached_input_nanousd}"
            " for the shipped model. What the price book knows already stays as it is there; a model without "
            "any price is refused, MODEL=0/0 is free.",
        ),
    )
    tier_prices: dict[str, int] = field(
        default_factory=lambda: dict(TIER_PRICES),
        metadata=about(
            values.multipliers(tuple(TIER_PRICES)),
            "What a tier multiplies the price by, in thousandths, of models priced from now on.",
        ),
    )
    upstreams: tuple[UpstreamSettings, ...] = field(
        default=(),
        metadata=about(
            upstream_settings.upstreams(),
            "Servers that run models here and speak OpenAI's API: vLLM, SGLang, TensorRT-LLM, another"
            " Fairgate.",
        ),
    )
    aliases: dict[str, dict[str, int]] = field(
        default_factory=dict,
        metadata=about(
            upstream_settings.aliases(), "Other names of models, each for one or several of them by weight."
        ),
    )
    log_level: str = field(
        default="info",
        metadata=about(values.word("debug", "info", "warning", "error"), "How much the log on stderr says."),
    )
    pepper: str = field(
        default="",
        repr=False,
        metadata=about(
            values.text_of("at least 32 characters without spaces", r"(\S{32,1024})?"),
            "Secret that keys are hashed with; the default is the file pepper in the data directory.",
            secret=True,
        ),
    )
    engine: EngineSettings = field(default_factory=EngineSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)

    @property
    def served_model_name(self) -> str:
        """The name in the API of our own engine's model, or of the first upstream's where there is none."""
        if self.engine.serve == "no" and self.upstreams:
            return self.upstreams[0].pool_name
        if self.model_name:
            return self.model_name
        if self.model.resolve() == SHIPPED_MODEL.resolve():
            return SHIPPED_MODEL_NAME
        return self.model.resolve().name

    @property
    def pool_names(self) -> tuple[str, ...]:
        """Every served model, our own engine's first."""
        own = (self.served_model_name,) if self.engine.serve == "yes" else ()
        return tuple(dict.fromkeys((*own, *(each.pool_name for each in self.upstreams))))

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
    def resolved_policy_table(self) -> str:
        """Where the batch-or-wait table is, from wherever it is looked for; empty: there is none."""
        return str(Path(self.policy_table).expanduser().absolute()) if self.policy_table else ""

    @property
    def model_prices(self) -> dict[str, Price]:
        """Prices by model name: those that were set, and the shipped model's. Any other has none: a model is
        free only where somebody says so."""
        is_shipped = self.engine.serve == "yes" and self.model.resolve() == SHIPPED_MODEL.resolve()
        return ({self.served_model_name: SHIPPED_PRICE} if is_shipped else {}) | self.prices

    @property
    def tier_multipliers(self) -> dict[Tier, int]:
        """`tier_prices` by tier."""
        return {Tier(name): multiplier for name, multiplier in self.tier_prices.items()}


@dataclass(frozen=True)
class SettingInfo:
    """One row of the table of settings."""

    name: str
    """`port`, or `engine.threads`."""
    kind: values.ValueKind[Any]
    default: Any
    help: str
    secret: bool

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace(".", "-").replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.replace(".", "_").upper()

    @property
    def toml_key(self) -> str:
        """Where it stands in the TOML file."""
        section, _, key = self.name.rpartition(".")
        return f"[{section}] {key}" if section else key

    @property
    def default_text(self) -> str:
        """The default as people would write it; empty where it is derived."""
        if self.default == SHIPPED_MODEL:
            return ""
        if isinstance(self.default, dict):
            return ",".join(f"{key}={value}" for key, value in self.default.items())
        if isinstance(self.default, tuple):
            return ""
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return str(self.default)


def _rows(cls: type, prefix: str = "") -> list[SettingInfo]:
    defaults = cls()
    rows: list[SettingInfo] = []
    for item in fields(cls):
        default = getattr(defaults, item.name)
        if "kind" in item.metadata:
            rows.append(
                SettingInfo(
                    prefix + item.name,
                    item.metadata["kind"],
                    default,
                    item.metadata["help"],
                    item.metadata["secret"],
                )
            )
        else:
            rows += _rows(type(default), f"{item.name}.")
    return rows


SETTINGS: tuple[SettingInfo, ...] = tuple(_rows(Settings))
"""All settings, in the order of the documentation."""


def settings_table() -> list[dict[str, str]]:
    """Every setting as plain text: name, flag, variable, TOML key, default, accepted values, meaning."""
    return [
        {
            "name": row.name,
            "flag": row.flag,
            "variable": row.variable,
            "toml": row.toml_key,
            "default": row.default_text,
            "accepts": row.kind.accepts,
            "help": row.help,
        }
        for row in SETTINGS
    ]


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
    parsed = {name: _parse(_info(name), text, source) for name, (text, source) in raw.items()}
    groups = {
        item.name: _build(type(getattr(Settings(), item.name)), parsed, f"{item.name}.")
        for item in fields(Settings)
        if "kind" not in item.metadata
    }
    settings: Settings = _build(Settings, parsed | groups, "")
    object_data_dir = settings.data_dir.absolute()
    settings = _replaced(settings, data_dir=object_data_dir, model=settings.model.absolute())
    tiers = TIER_PRICES | settings.tier_prices
    return _replaced(settings, tier_prices=tiers)


def _replaced(settings: Settings, **changes: Any) -> Settings:
    current = {item.name: getattr(settings, item.name) for item in fields(Settings)}
    return Settings(**(current | changes))


def _build(cls: Callable[..., Any], parsed: Mapping[str, Any], prefix: str) -> Any:
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: parsed[prefix + name] for name in names if prefix + name in parsed})


def _info(name: str) -> SettingInfo:
    for row in SETTINGS:
        if row.name == name:
            return row
    raise BadSetting(f"unknown setting {name!r}")


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
    found: dict[str, tuple[str, str]] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(IGNORED_PREFIX):
            continue
        if variable == CONFIG_VARIABLE:
            continue
        if variable not in by_variable:
            raise BadSetting(
                f"unknown setting: environment variable {variable}{_nearest(variable, by_variable)}"
            )
        found[by_variable[variable].name] = (text, f"environment variable {variable}")
    return found


def _from_file(config_file: Path) -> dict[str, tuple[str, str]]:
    try:
        document = tomllib.loads(config_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetting(f"config file {config_file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"config file {config_file} is not TOML: {error}") from None
    known = {row.name for row in SETTINGS}
    groups = {name.partition(".")[0] for name in known if "." in name}
    found: dict[str, tuple[str, str]] = {}
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
            found[name] = (_as_text(item), source)
    return found


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else "; `fairgate serve --help` lists all settings"


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
