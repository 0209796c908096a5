"""The active scheduling policy, its recent decisions and steps, and its change.

One name and its options set both the queue's order and all four choices of every engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from engine.scheduling.options import BadOption, parsed_options
from engine.scheduling.policy import policy_names
from engine.scheduling.reasons import reason
from engine.scheduling.templates import template
from gateway.upstream.base import Upstream, UpstreamLost
from tenants.admin.audit import Actor
from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import IfMatch

if TYPE_CHECKING:
    from gateway.gateway import Gateway
    from gateway.requests.schemas import PolicyChange

MAX_DECISIONS = 256
MAX_STEPS = 4096


def tenant_names(gateway: Gateway, tenant_ids: Iterable[str]) -> dict[str, str]:
    tenants = ((tenant_id, gateway.deps.directory.tenant(tenant_id)) for tenant_id in sorted(set(tenant_ids)))
    return {tenant_id: tenant.name for tenant_id, tenant in tenants if tenant is not None}


async def policy_of(gateway: Gateway, decisions: int, steps: int = 0) -> dict[str, Any]:
    """The queue's order, and each engine's choices with its latest `decisions` and `steps`, oldest first."""
    in_force = gateway.policy
    shown: dict[str, Any] = {
        **in_force.now.as_json(),
        "order": gateway.pools.first.flow.order_name,
        "from": "stored" if in_force.is_stored else "settings",
        "settings": in_force.settings.as_json(),
        "problem": in_force.problem,
        "notice": in_force.notice,
        "learned": {
            name: learned
            for name, pool in gateway.pools.items()
            if (learned := pool.control.learned.as_json()) is not None
        },
        "policies": policy_names(in_force.options),
    }
    engines = [await _engine(upstream, decisions, steps) for upstream in gateway.deps.upstreams]
    ids = {
        tenant_id
        for engine in engines
        for step in engine.get("steps", ())
        for by_tenant in step.values()
        if isinstance(by_tenant, dict)
        for tenant_id in by_tenant
    }
    return shown | {"engines": engines, "tenants": tenant_names(gateway, ids)}


async def change_policy(
    gateway: Gateway, actor: Actor, wanted: PolicyChange, if_match: IfMatch = None
) -> None:
    """Changes it in all gateways; before that raises ValueError, `Invalid`, `PreconditionFailed`."""
    if wanted.from_settings:
        if wanted.policy or wanted.options or wanted.template:
            raise BadOption("from_settings gives up what is stored: it takes no policy, options or template")
        await gateway.policy.change(actor, None, if_match)
        return
    asked = _template_options(gateway, wanted.template) | wanted.options
    options = parsed_options(asked).changed()
    await gateway.policy.change(actor, StoredPolicy(wanted.policy, options), if_match)


def _template_options(gateway: Gateway, name: str) -> dict[str, Any]:
    """The template's options for the served model, without sizes that belong to an engine's start."""
    if not name:
        return {}
    ready = next((upstream.ready for upstream in gateway.deps.upstreams if upstream.ready is not None), None)
    if ready is None:
        raise BadOption("a template goes by the model's length, and no engine has told one yet")
    return template(name, ready.model.context_tokens).options.changed()


async def _engine(upstream: Upstream, decisions: int, steps: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"engine_id": upstream.replica_id, "is_up": upstream.is_up}
    if not upstream.is_up:
        return shown
    try:
        explained = await upstream.explain(steps)
    except UpstreamLost:
        return shown | {"is_up": False}
    return shown | {
        "policy": explained.policy,
        "options": explained.options,
        "choices": explained.choices,
        "decisions": [
            {
                "step": decision.step,
                "at_s": decision.at_s,
                "kind": decision.kind,
                "sequence_id": decision.sequence_id,
                "rule": decision.rule,
                "rank": decision.rank,
                "reason": reason(decision.rule, decision.rank),
                "others": decision.others,
            }
            for decision in explained.decisions[-decisions:]
        ]
        if decisions
        else [],
        "steps": [asdict(step) for step in explained.steps],
        "decode_slots": None if explained.decode_slots is None else asdict(explained.decode_slots),
    }
