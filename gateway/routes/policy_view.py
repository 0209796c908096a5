"""The scheduling policy in force, its latest decisions, and its change.

One name sets both: the order of the gateway's queue, and all four choices of every engine.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from engine.scheduling.policy import UnknownPolicy, make_policy, policy_names
from gateway.upstream.base import Upstream, UpstreamLost
from tenants.admin.audit import Actor

if TYPE_CHECKING:
    from gateway.gateway import Gateway

MAX_DECISIONS = 256


async def policy_of(gateway: Gateway, decisions: int) -> dict[str, Any]:
    """The queue's order, and each engine's choices with its latest `decisions`, oldest first."""
    return {
        "policy": gateway.policy,
        "order": gateway.flow.order_name,
        "policies": policy_names(gateway.deps.config.policy_options),
        "engines": [await _engine(each, decisions) for each in gateway.deps.upstreams],
    }


async def change_policy(gateway: Gateway, actor: Actor, name: str) -> None:
    """Changes the policy of the queue and of every engine that is up; the others get it when they are back.

    Raises `UnknownPolicy` before anything has changed (`NeedsTable` where the policy needs a table), and
    afterwards where a shared engine refuses it.
    """
    policy = make_policy(name, gateway.deps.config.policy_options)
    for pool in gateway.pools.values():
        pool.dispatcher.require_order(policy.order)
    await gateway.deps.admin.note(
        actor, "policy.set", "policy", before={"policy": gateway.policy}, after={"policy": name}
    )
    gateway.policy = name
    for pool in gateway.pools.values():
        pool.flow.set_order(policy.order)
    refused: list[str] = []
    for upstream in gateway.deps.upstreams:
        if upstream.is_up:
            with contextlib.suppress(UpstreamLost):
                try:
                    await upstream.set_policy(name)
                except ValueError as error:
                    refused.append(f"{upstream.replica_id} refuses it: {error}")
    if refused:
        raise UnknownPolicy(f"the queue has {name} now, but {'; '.join(refused)}")


async def _engine(upstream: Upstream, decisions: int) -> dict[str, Any]:
    shown: dict[str, Any] = {"engine_id": upstream.replica_id, "is_up": upstream.is_up}
    if not upstream.is_up:
        return shown
    try:
        explained = await upstream.explain()
    except UpstreamLost:
        return shown | {"is_up": False}
    return shown | {
        "policy": explained.policy,
        "choices": explained.choices,
        "decisions": [
            {
                "step": each.step,
                "at_s": each.at_s,
                "kind": each.kind,
                "sequence_id": each.sequence_id,
                "rule": each.rule,
                "rank": each.rank,
                "others": each.others,
            }
            for each in explained.decisions[-decisions:]
        ]
        if decisions
        else [],
    }
