"""`fairgate policy show` and `fairgate policy set`: the policy of a running server."""

from __future__ import annotations

from typing import Any

import click

from engine.scheduling.compose.auto_slots import fair_pair
from ops.cli.base import Command, answer
from ops.cli.live import call, require_server
from ops.cli.options import Number
from ops.reporting import table


@click.command(cls=Command)
@click.option(
    "--decisions",
    type=Number(int, 0, 256),
    default=20,
    show_default=True,
    help="How many of the last decisions.",
)
@click.option(
    "--steps",
    type=Number(int, 0, 4096),
    default=0,
    show_default=True,
    help="How many of the last steps, each with its tokens by tenant.",
)
def show(decisions: int, steps: int) -> None:
    """Shows the policy in force, and the last decisions and steps of each engine.

    Where tokens are shared by weight: how many sequences decode in a step, what that costs, and what a weight
    gets by it. For every admission and every eviction: the rule that chose, its reason in words, and which
    sequences were displaced or gave way. It also says whether the policy comes from the settings, or was
    stored by `fairgate policy set`, and where the two differ.

    \b
    --json answers:
      {"policy": "hybrid", "options": {}, "order": "hybrid", "from": "settings",
       "settings": {"policy": "hybrid", "options": {}}, "problem": "", "notice": "", "policies": ["drr", ...],
       "learned": {"my-model": {"problem": "", "macro_state": 5, "words": "a queue; ...", "is_outside": false,
       "actions": {"slots": 0.5, ...}, ...}},
       "engines": [{"engine_id": "engine-0", "is_up": true, "policy": "hybrid", "options": {},
       "choices": {"order": "hybrid", "admit": "predicted-reserve", ...},
       "decisions": [{"step": 17, "at_s": 3.2, "kind": "admit", "sequence_id": "...", "rule": "...",
       "rank": [1, 0, 12.5], "reason": "tier standard; then ...", "others": []}],
       "steps": [{"step": 17, "at_s": 3.2, "slots": 16, "decodes": {"ten_1": 4}, "prompts": {},
       "left_tokens": 508, "waiting_decodes": {}, "longest_gap_steps": {}, "waiting_prompt_tokens": {},
       "waiting": {}}], "decode_slots": {"slots": 25, "places": 32, "is_auto": true, "tokens_per_s": 2915.2,
       "all_tokens_per_s": 3107.4}}], "tenants": {"ten_1": "acme"}}
    """
    query = {"decisions": decisions, "steps": steps}
    _print(call(require_server(), "GET", "/policy", query=query))


@click.command("set", cls=Command)
@click.argument("name", required=False)
@click.option(
    "--option",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option, such as slots=16 (repeat). Others get their defaults.",
)
@click.option(
    "--template",
    metavar="TEMPLATE",
    help="Options for one kind of load: interactive, throughput or long-context. (Its sizes belong to the"
    " start.)",
)
@click.option(
    "--from-settings", is_flag=True, help="Remove the stored policy: each gateway uses its settings again."
)
def set_policy(name: str | None, options: tuple[str, ...], template: str | None, from_settings: bool) -> None:
    """Changes the policy of the running server, from its next step on.

    Waiting and running requests go on. The policy is stored in the database: all gateways use it within a
    second and after restarts, instead of the settings, until `--from-settings`. `fairgate policy
    list` has the names, `fairgate policy explain NAME` the options.

    \b
      fairgate policy set srpt
      fairgate policy set vtc --option slots=16 --option cap_tokens=128
      fairgate policy set --from-settings
    --json answers what `policy show --decisions 0` does:
      {"policy": "srpt", "options": {}, "order": "srpt", "from": "stored", "policies": ["drr", ...],
       "engines": [...]}
    """
    if from_settings == (name is not None):
        raise click.UsageError("name a policy, or --from-settings")
    body: dict[str, Any] = {"policy": name or "", "template": template or "", "from_settings": from_settings}
    body["options"] = dict(_named(option) for option in options)
    _print(call(require_server(), "POST", "/policy", body=body))


def _named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise click.UsageError(f"--option {text!r} is not NAME=VALUE")
    return name.strip().replace("-", "_"), value.strip()


def _headline(shown: dict[str, Any]) -> list[str]:
    from gateway.flow.learned.report import at_work_words

    lines = [f"policy {_described(shown)} (the queue's order: {shown['order']})"]
    lines += [line for line in (shown["problem"], shown["notice"]) if line]
    for model, learned in shown["learned"].items():
        lines.append(f"{model}: {at_work_words(learned)}")
    if shown["from"] == "stored":
        lines.append("stored by `fairgate policy set`; the settings are not used")
        if shown["settings"] != {"policy": shown["policy"], "options": shown["options"]}:
            lines.append(
                f"the settings say {_described(shown['settings'])} (`fairgate policy set --from-settings`)"
            )
    return lines


def _described(policy: dict[str, Any]) -> str:
    options = ", ".join(f"{name}={value}" for name, value in policy["options"].items())
    return f"{policy['policy']} ({options})" if options else str(policy["policy"])


def slots_lines(slots: dict[str, Any]) -> list[str]:
    """How many of the places decode in a step, what that costs, and what a weight gets by it."""
    number, places = slots["slots"], slots["places"]
    by = "by the measured step time" if slots["is_auto"] else "as the options say"
    if slots["all_tokens_per_s"]:
        kept = slots["tokens_per_s"] / slots["all_tokens_per_s"]
        cost = f"{slots['tokens_per_s']:,.0f} tokens/s of {slots['all_tokens_per_s']:,.0f}, {kept:.0%}"
    else:
        cost = "their cost is not measured yet"
    light, heavy = fair_pair(places // 2, places // 2, 3.0, min(number, places // 2 * 2))
    lines = [f"{number} of {places} places decode in a step, {by} ({cost})"]
    if light and number < places:
        lines.append(
            f"weights 1 and 3 with half of the places each: {light:.3g} and {heavy:.3g} tokens of a step, 1 :"
            f" {heavy / light:.3g}; 1 : 3 with slots={places * 2 // 3} or fewer"
        )
    elif number == places:
        lines.append("each sequence has a token of each step: weights decide who runs")
    return lines


def _by_tenant(tokens: dict[str, int], names: dict[str, str]) -> str:
    return " ".join(f"{names.get(tenant, tenant)} {number}" for tenant, number in tokens.items())


def _print(shown: dict[str, Any]) -> None:
    def text() -> None:
        for line in _headline(shown):
            click.echo(line)
        for engine in shown["engines"]:
            if not engine["is_up"]:
                click.echo(f"engine {engine['engine_id']} is down")
                continue
            choices = ", ".join(f"{decision} {name}" for decision, name in engine["choices"].items())
            click.echo(f"engine {engine['engine_id']}: {engine['policy']} ({choices})")
            for line in slots_lines(engine["decode_slots"]) if engine["decode_slots"] else ():
                click.echo(line)
            if engine["decisions"]:
                table(
                    "last decisions",
                    ("step", "what", "sequence", "rule", "reason", "displaced / gave way to"),
                    [
                        (
                            decision["step"],
                            decision["kind"],
                            decision["sequence_id"],
                            decision["rule"],
                            decision["reason"],
                            " ".join(decision["others"]),
                        )
                        for decision in engine["decisions"]
                    ],
                )
            if engine["steps"]:
                table(
                    "last steps, tokens by tenant",
                    (
                        "step",
                        "slots",
                        "answers",
                        "prompts",
                        "left",
                        "answers that waited",
                        "longest gap, steps",
                        "prompt tokens to come",
                        "in line for a place",
                    ),
                    [
                        (
                            step["step"],
                            step["slots"],
                            _by_tenant(step["decodes"], shown["tenants"]),
                            _by_tenant(step["prompts"], shown["tenants"]),
                            step["left_tokens"],
                            _by_tenant(step["waiting_decodes"], shown["tenants"]),
                            _by_tenant(step["longest_gap_steps"], shown["tenants"]),
                            _by_tenant(step["waiting_prompt_tokens"], shown["tenants"]),
                            _by_tenant(step["waiting"], shown["tenants"]),
                        )
                        for step in engine["steps"]
                    ],
                )

    answer(shown, text)
