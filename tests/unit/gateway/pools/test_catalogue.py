"""Names of models, settings of other servers, and the pools made of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from gateway.pools.catalogue import Catalogue, merged
from gateway.pools.pool import PoolSpec
from gateway.requests.prompt import EstimatedRenderer
from gateway.upstream.openai.config import UpstreamSettings
from gateway.upstream.replica_set import ReplicaSet
from ops.serving.upstream_pools import pools_of
from ops.settings.settings import BadSetting, load
from tenants.errors import Invalid
from tenants.nouns.alias import Alias, AliasSet, Chain, alias_as_json, draft_of, read_alias


def up(_: str) -> bool:
    return True


def test_names_are_pools_and_aliases() -> None:
    catalogue = Catalogue(["a", "b"], {"both": {"a": 3, "b": 1}})
    assert catalogue.names() == ["a", "b", "both"]
    assert catalogue.choose("a", 0.99, up) == "a"
    with pytest.raises(KeyError):
        catalogue.choose("c", 0.0, up)


def test_an_alias_shares_by_weight_among_those_that_serve() -> None:
    catalogue = Catalogue(["a", "b", "c"], {"both": {"a": 3, "b": 1, "c": 0}})
    drawn = Counter(catalogue.choose("both", number / 1000, up) for number in range(1000))
    assert drawn == {"a": 750, "b": 250}
    assert {catalogue.choose("both", n / 100, lambda pool: pool == "b") for n in range(100)} == {"b"}
    none_up = Counter(catalogue.choose("both", number / 1000, lambda _: False) for number in range(1000))
    assert none_up == drawn


@pytest.mark.parametrize(
    ("aliases", "says"),
    [
        ({"x": {}}, "'x' means nothing"),
        ({"x": {"a": 0}}, "'x' means nothing"),
        ({"x": {"ghost": 1}}, "'x' means 'ghost', which is no model here; there are a, b"),
        ({"a": {"b": 1}}, "'a' is the name of a model"),
        ({"x": {"a": -1}}, "must be 0 to"),
        ({"x": Chain(("a", "ghost"))}, "'x' means 'ghost', which is no model here; there are a, b"),
        ({"x": Chain(("x", "a"))}, "the chain of 'x' names the alias 'x', and so could go in a circle"),
        ({"x": Chain(("a", "y")), "y": {"b": 1}}, "the chain of 'x' names the alias 'y'.* name models in it"),
        ({"x": Chain(("y",)), "y": Chain(("x",))}, "circle: name models in it; there are a, b"),
    ],
)
def test_an_alias_to_nothing_is_refused_by_name(aliases: dict[str, Alias], says: str) -> None:
    with pytest.raises(Invalid, match=says) as refused:
        Catalogue(["a", "b"], aliases)
    assert refused.value.field == "aliases"


def test_a_chain_keeps_its_order() -> None:
    chain = Chain(("b", "a"), 1.5)
    catalogue = Catalogue(["a", "b"], {"big": chain, "half": {"a": 1, "b": 1}})
    assert catalogue.chain("big") is chain
    assert (catalogue.chain("half"), catalogue.chain("a"), catalogue.chain("ghost")) == (None, None, None)
    assert [pool for pool, _ in catalogue.targets("big")] == ["b", "a"]
    assert alias_as_json(chain) == {"chain": ["b", "a"], "max_price": 1.5}
    assert alias_as_json({"a": 1}) == {"a": 1}


def test_a_stored_alias_takes_the_place_of_the_settings() -> None:
    of_settings: dict[str, Alias] = {"big": {"a": 1}, "gone": {"a": 1}, "kept": {"b": 1}}
    stored: dict[str, Alias] = {
        "big": {"b": 1},
        "gone": {"ghost": 1},
        "a": {"b": 1},
        "new": Chain(("b", "a")),
    }
    catalogue, left_out = merged(["a", "b"], of_settings, stored)
    assert catalogue.aliases == {"kept": {"b": 1}, "big": {"b": 1}, "new": Chain(("b", "a"))}
    assert left_out == {
        "gone": "'gone' means 'ghost', which is no model here; there are a, b",
        "a": "'a' is the name of a model: give the alias another one",
    }


@pytest.mark.parametrize(
    ("typed", "means", "shown"),
    [
        ("my-model", {"my-model": 1}, "my-model"),
        ("llama3:8b=3,b", {"llama3:8b": 3, "b": 1}, "llama3:8b = 3, b = 1"),
        ("a>b", Chain(("a", "b")), "a > b"),
    ],
)
def test_an_alias_is_stored_as_it_is_typed(typed: str, means: Alias, shown: str) -> None:
    draft = draft_of(AliasSet(name="big", means=typed))
    assert (draft.means, draft.alias, read_alias(shown)) == (shown, means, means)


@pytest.mark.parametrize(
    ("name", "means", "max_price", "says"),
    [
        ("b g", "a", 1, "name: 'b g' is no name of a model"),
        ("big", "a b", 1, "means: 'a b' is no name of a model"),
        ("big", "a >", 1, "means: '' is no name of a model"),
        ("big", "a > big", 1, "means: 'big' cannot mean itself"),
        ("big", "a, a", 1, "means: names 'a' twice"),
        ("big", "a > a", 1, "means: names 'a' twice"),
        ("big", "a = 2.5", 1, "means: the weight '2.5' must be a whole number, 0 to 1000000"),
        ("big", "a = 0", 1, "means: gives no model a weight above 0"),
        ("big", ",".join("abcdefghi"), 1, "means: names 9 models; the most is 8"),
        ("big", "a, b", 2, "max_price: goes with a chain"),
        ("big", "a > b", 0, "max_price: is 0, and must be above 0"),
    ],
)
def test_an_alias_is_refused_by_field(name: str, means: str, max_price: float, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        draft_of(AliasSet(name=name, means=means, max_price=max_price))


TOML = """
[engine]
serve = "no"

[[upstreams]]
name = "llama-a"
url = "http://10.0.0.5:8000/v1"
model = "meta/llama"
priority = "vllm"

[[upstreams]]
name = "llama-b"
url = "https://10.0.0.6"
model = "llama-at-b"
pool = "meta/llama"
max_concurrent = 64
context_tokens = 8192

[aliases]
big = { "meta/llama" = 1 }
safe = { chain = ["meta/llama", "other"], max_price = 1.5 }
plain = { chain = ["meta/llama"] }
weighted = { chain = 2, max_price = 1 }
"""


def test_servers_and_aliases_are_tables_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(TOML)
    settings = load({}, {}, path)
    assert [each.name for each in settings.upstreams] == ["llama-a", "llama-b"]
    assert settings.upstreams[1].max_concurrent == 64
    assert settings.aliases == {
        "big": {"meta/llama": 1},
        "safe": Chain(("meta/llama", "other"), 1.5),
        "plain": Chain(("meta/llama",), 1.0),
        "weighted": {"chain": 2, "max_price": 1},
    }
    assert settings.model_names == ("meta/llama", "big", "safe", "plain", "weighted")
    assert settings.served_model_name == "meta/llama"
    assert settings.model_prices == {}


@pytest.mark.parametrize(
    ("means", "says"),
    [
        ("{ chain = [] }", "'big': chain: must name 1 to 8 models; it names 0"),
        (
            '{ chain = ["a","b","c","d","e","f","g","h","i"] }',
            "'big': chain: must name 1 to 8 models; it names 9",
        ),
        ('{ chain = ["a", "a"] }', "'big': chain: names 'a' twice: leave the second one out"),
        ('{ chain = "a" }', "'big': Expected `array`, got `str` - at `$.chain`"),
        ('{ chain = ["a b"] }', "'big': Expected `str` matching regex"),
        ('{ chain = ["a"], max_price = 0 }', "'big': max_price: is 0, and must be above 0 and at most 1000"),
        ('{ chain = ["a"], max_price = -1.5 }', "'big': max_price: is -1.5, and must be above 0"),
        ('{ chain = ["a"], max_price = 1001 }', "'big': max_price: is 1001, and must be above 0 and at most"),
        ('{ chain = ["a"], max_price = nan }', "'big': max_price: is nan, and must be above 0"),
        ('{ chain = ["a"], max_price = inf }', "'big': max_price: is inf, and must be above 0"),
        ('{ chain = ["a"], max_price = "low" }', "'big': Expected `float`, got `str` - at `$.max_price`"),
        ("{ max_price = 1.5 }", "'big': Object missing required field `chain`"),
        ('{ chain = ["a"], weight = 1 }', "'big': Object contains unknown field `weight`"),
    ],
)
def test_a_bad_chain_stops_the_start_by_its_name(tmp_path: Path, means: str, says: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(f"[aliases]\nbig = {means}\n")
    with pytest.raises(BadSetting) as bad:
        load({}, {}, path)
    assert says in str(bad.value)
    assert "setting aliases (file" in str(bad.value)
    assert "such as big = {my-model = 1}" in str(bad.value), "the way out"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('url = "ftp://x"', r"\$\[0\]\.url"),
        ("max_concurrent = 0", "max_concurrent"),
        ('priority = "high"', "priority"),
        ('prefix_cache = "often"', "prefix_cache"),
        ('colour = "red"', "colour"),
        ('name = "a b"', "name"),
        ("between_s = 0.0", "between_s"),
    ],
)
def test_a_bad_server_is_refused_by_its_field(tmp_path: Path, line: str, says: str) -> None:
    good = {"name": '"a"', "url": '"http://x"', "model": '"m"'}
    key = line.partition(" ")[0]
    lines = [f"{name} = {value}" for name, value in good.items() if name != key]
    path = tmp_path / "f.toml"
    path.write_text("\n".join(["[[upstreams]]", *lines, line]))
    with pytest.raises(BadSetting, match=says):
        load({}, {}, path)


def test_two_servers_of_one_name_are_refused() -> None:
    one = '{"name": "a", "url": "http://x", "model": "m"}'
    with pytest.raises(BadSetting, match="'a' is there twice"):
        load({"upstreams": f"[{one}, {one}]"})


def test_the_plugin_and_its_key_go_together() -> None:
    one = {"name": "a", "url": "http://h/v1", "model": "m", "priority": "fairgate"}
    with pytest.raises(BadSetting, match='a: priority = "fairgate" needs plugin_key_file'):
        load({"upstreams": json.dumps([one])})
    with pytest.raises(BadSetting, match="plugin_key_file and plugin_socket go with"):
        load({"upstreams": json.dumps([one | {"priority": "vllm", "plugin_socket": "/run/fairgate.sock"}])})
    (found,) = load({"upstreams": json.dumps([one | {"plugin_key_file": "/run/key"}])}).upstreams
    assert (found.priority.value, found.plugin_key_file, found.plugin_socket) == ("fairgate", "/run/key", "")


def server(name: str, model: str = "m", **fields: object) -> UpstreamSettings:
    return UpstreamSettings(name=name, url="http://127.0.0.1:1", model=model, **fields)  # type: ignore[arg-type]


async def test_replicas_of_one_model_stand_in_for_each_other() -> None:
    pools, started = pools_of((server("a"), server("b"), server("c", "other")), {}, None)
    assert [(pool.name, len(pool.upstreams)) for pool in pools] == [("m", 2), ("other", 1)]
    assert all(pool.is_estimated and pool.is_foreign for pool in pools)
    a, b, c = started
    assert (list(a.stand_ins), list(b.stand_ins), list(c.stand_ins)) == ([b], [a], [])


async def test_a_server_of_our_engines_model_joins_its_pool() -> None:
    own = PoolSpec("m", ReplicaSet(), EstimatedRenderer())
    (pool,), (joined,) = pools_of((server("a"),), {}, own)
    assert pool.name == "m"
    assert list(pool.upstreams) == [joined]
    assert pool.is_foreign
    with pytest.raises(Invalid, match="leave tokenizer_dir out"):
        pools_of((server("a", tokenizer_dir="/x"),), {}, own)


async def test_a_key_that_is_not_there_is_named() -> None:
    with pytest.raises(Invalid, match="a: the environment variable MY_KEY holds no API key"):
        pools_of((server("a", api_key_env="MY_KEY"),), {}, None)
    _, (made,) = pools_of((server("a", api_key_env="MY_KEY"),), {"MY_KEY": " s3cret\n"}, None)
    assert made.server.api_key == "s3cret"


async def test_bad_urls_and_no_models_at_all_are_refused() -> None:
    for url in ("http://user:pass@host", "http://host?x=1", "http://host:99999"):
        with pytest.raises(Invalid, match="url"):
            pools_of((UpstreamSettings(name="a", url=url, model="m"),), {}, None)
    with pytest.raises(Invalid, match="there is no other server"):
        pools_of((), {}, None)


def test_an_estimated_prompt_grows_with_its_text_and_shares_prefixes() -> None:
    renderer = EstimatedRenderer()
    short = [{"role": "user", "content": "Hello there"}]
    tokens = renderer.chat_tokens(short)
    assert len(tokens) >= len("Hello there") // 2
    longer = renderer.chat_tokens([*short, {"role": "assistant", "content": "General"}])
    assert longer[: len(tokens)] == tokens
    assert len(renderer.text_tokens("日本語のテキスト")) >= 8
    assert renderer.text_tokens("") == []
    assert renderer.text_tokens("\ud800x")
