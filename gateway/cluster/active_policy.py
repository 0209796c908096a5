"""The active scheduling policy: the stored one (`fairgate policy set`), otherwise the settings'.

One stored policy applies to all gateways of a database, which follow the directory's revision. Queue and
engines always have the same policy: each gateway that connects sends it to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import (
    LEARNED_POLICIES,
    UnknownPolicy,
    composition_notice,
    make_policy,
    options_of,
    refuse_idle_options,
)
from gateway.cluster.policy_check import checked_policy, learned_table_of, own_tables
from gateway.deps import GatewayDeps
from gateway.flow.learned.served import misfit
from gateway.flow.learned.table_file import BadLearnedTable, LearnedTable
from gateway.pools.pool import ModelPool
from gateway.upstream.base import Upstream, UpstreamLost
from tenants.admin.audit import Actor
from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import IfMatch
from tenants.errors import DatabaseUnavailable

FOLLOW_EVERY_S = 0.25

log = logging.getLogger("fairgate.gateway.policy")


class ActivePolicy:
    def __init__(self, deps: GatewayDeps, pools: Mapping[str, ModelPool]) -> None:
        """`pools` may be filled later, before `start`."""
        config = deps.config
        self.settings = StoredPolicy(config.policy, config.policy_options.changed())
        """From the settings."""
        self.now = self.settings
        self.is_stored = False
        self.problem = ""
        """Why a stored policy is not active; empty: it is, or there is none."""
        self._deps = deps
        self._pools = pools
        self._seen_revision = -1
        self._changing = asyncio.Lock()

    @property
    def options(self) -> PolicyOptions:
        return self._options(self.now)

    @property
    def notice(self) -> str:
        """What the options turn off; empty: nothing."""
        return composition_notice(self.now.name, self.options)

    async def start(self) -> None:
        """Activates the stored policy or the settings', in the engines too."""
        self._seen_revision = self._deps.directory.revision
        stored = await self._deps.admin.policy.stored()
        if stored is not None:
            self._take(stored)
            if self.is_stored and stored != self.settings:
                log.warning(
                    "the stored policy %s is in force, and the settings say %s: `fairgate policy set"
                    " --from-settings` gives up the stored one",
                    described(stored),
                    described(self.settings),
                )
        if self.notice:
            log.warning("%s", self.notice)
        self._take_table()
        await self._tell_engines()

    async def tell(self, upstream: Upstream) -> None:
        """A replica that has joined; one that refuses the policy says so in its own log, too."""
        if refused := await self._tell_one(upstream, self.now):
            log.error("policy %s: %s", described(self.now), refused)

    async def follow(self) -> None:
        async with self._changing:
            await self._follow()

    async def _follow(self) -> None:
        revision = self._deps.directory.revision
        if revision == self._seen_revision:
            return
        try:
            stored = await self._deps.admin.policy.stored()
        except DatabaseUnavailable:
            return
        self._seen_revision = revision
        before = self.now
        self._take(stored)
        if self.now != before:
            log.info("the policy is %s now", described(self.now))
            self._take_table()
            await self._tell_engines()

    async def change(self, actor: Actor, wanted: StoredPolicy | None, if_match: IfMatch = None) -> None:
        """Stores and activates the policy; None: removes the stored one.

        Before any change raises ValueError (`UnknownPolicy`, `BadOption`, `BadTable`, `BadLearnedTable`,
        `NeedsTable`, an engine's refusal), `Invalid`, `PreconditionFailed` or `DatabaseUnavailable`.
        """
        async with self._changing:
            await self._change(actor, wanted, if_match)

    def checked(self, wanted: StoredPolicy) -> StoredPolicy:
        """The policy with its changed options, if it could be stored. Raises ValueError."""
        policy = checked_policy(wanted, self._deps.config.policy_options)
        order = make_policy(policy.name, self._options(policy)).order
        for pool in self._pools.values():
            pool.dispatcher.require_order(order)
        return policy

    async def _change(self, actor: Actor, wanted: StoredPolicy | None, if_match: IfMatch) -> None:
        asked = wanted or self.settings
        options = self._options(asked)
        policy = make_policy(asked.name, options)
        if wanted is not None:
            refuse_idle_options(asked.name, options)
        for pool in self._pools.values():
            pool.dispatcher.require_order(policy.order)
        self._require_served(learned_table_of(asked.name, options))
        before = self.now
        refused = await self._tell(asked)
        try:
            if refused:
                raise UnknownPolicy(refused)
            if wanted is None:
                await self._deps.admin.policy.forget(actor, asked, before, if_match=if_match)
            else:
                await self._deps.admin.policy.store(actor, wanted, before, if_match=if_match)
        except Exception:
            await self._tell(before)
            raise
        self._take(wanted)
        self._take_table()

    def _options(self, policy: StoredPolicy) -> PolicyOptions:
        """A stored policy without a table of its own may use the settings'. Raises ValueError."""
        mine = self._deps.config.policy_options
        if policy == self.settings:
            return mine
        return options_of(own_tables(mine) | dict(policy.options))

    def _require_served(self, table: LearnedTable | None) -> None:
        """Raises `BadLearnedTable` for a table that fits no served model."""
        if table is None:
            return
        misfits = [
            misfit(
                table,
                pool.spec.name,
                [upstream.ready.model for upstream in pool.spec.upstreams if upstream.ready is not None],
            )
            for pool in self._pools.values()
        ]
        if misfits and all(misfits):
            raise BadLearnedTable(misfits[0])

    def _take_table(self) -> None:
        """Gives the control loops a learned policy's table; without a usable one they act as hybrid."""
        table, problem, is_learned = None, "", self.now.name in LEARNED_POLICIES
        try:
            table = learned_table_of(self.now.name, self._options(self.now))
        except ValueError as error:
            problem = str(error)
        for pool in self._pools.values():
            pool.control.learned.use(table, problem, is_wanted=is_learned)

    def _take(self, stored: StoredPolicy | None) -> None:
        """Sets the order of the queues; ignores a stored policy that cannot be built."""
        self.problem, self.is_stored = "", stored is not None
        wanted = stored or self.settings
        try:
            order = make_policy(wanted.name, self._options(wanted)).order
            for pool in self._pools.values():
                pool.dispatcher.require_order(order)
        except ValueError as error:
            self.problem = f"the stored policy {described(wanted)} cannot be used: {error}"
            self.is_stored = False
            log.error("%s; the settings count", self.problem)
            wanted = self.settings
            order = make_policy(wanted.name, self._options(wanted)).order
        self.now = wanted
        for pool in self._pools.values():
            if pool.flow.order_name != order:
                pool.flow.set_order(order)

    async def _tell_engines(self) -> None:
        if refused := await self._tell(self.now):
            log.error("policy %s: %s", described(self.now), refused)

    async def _tell(self, policy: StoredPolicy) -> str:
        """Sends the policy to every engine, later to those that are down. Returns the refusals."""
        refused = [await self._tell_one(upstream, policy) for upstream in self._deps.upstreams]
        return "; ".join(filter(None, refused))

    async def _tell_one(self, upstream: Upstream, policy: StoredPolicy) -> str:
        options = self._options(policy).changed()
        # Read by gateways alone: an engine may not have the file, and a plug-in may not know the option.
        options.pop("learned_table", None)
        with contextlib.suppress(UpstreamLost):
            try:
                await upstream.set_policy(policy.name, options)
            except ValueError as error:
                return f"{upstream.replica_id} refuses it: {error}"
        return ""


def described(policy: StoredPolicy) -> str:
    """`vtc (slots=16)`."""
    options = ", ".join(f"{name}={value}" for name, value in policy.options.items())
    return f"{policy.name} ({options})" if options else policy.name
