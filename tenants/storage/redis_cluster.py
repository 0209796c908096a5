"""A client of a Redis Cluster with the interface of redis-py's asyncio `Redis`: one waiting pool for each
node.

redis-py 8's own does not fit: it has no pool that waits, sends ASKING over another connection than the
command, and drops the connections of all nodes where one says CLUSTERDOWN.

A command goes to the master of its key's slot. MOVED and ASK are followed. Where a node is lost, or says that
the cluster is down, only commands for its slots wait: which node has them is read again, with back-off, until
`timeout_s` is over. Then, as with one server that does not answer, they fail with `ConnectionError`.

A command is repeated after a lost connection, when it may have run already, unless `repeats_lost` is False.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import redis.asyncio as redis_client
from redis.asyncio.client import Pipeline
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import TimeoutError as TooLate

from tenants.storage.redis_slots import node_name, nodes_of_slots, slot_of

FIRST_PAUSE_S, MOST_PAUSE_S = 0.02, 0.5
FREE_REDIRECTS = 3
"""Followed at once; later ones after a pause, since the nodes do not agree."""

PATIENCE = 4
"""Nodes that may be asked in vain, within the timeout of a command, which node has which slots."""

LOST = (Disconnected, TooLate)
REDIRECTED = (AskError, TryAgainError, ClusterDownError, NoScriptError)
"""Of MOVED, too, which is an `AskError`."""

Command = tuple[Sequence[Any], Mapping[str, Any]]


class ClusterRedis(redis_client.Redis):
    def __init__(
        self, hosts: Sequence[str], open_node: Callable[[str], Any], timeout_s: float, repeats_lost: bool
    ) -> None:
        """`hosts`: nodes (`host:port`) that are asked first. `open_node` makes the client of one."""
        self._hosts = hosts
        self._open_node = open_node
        self._timeout_s = timeout_s
        self._repeats_lost = repeats_lost
        self._nodes: dict[str, Any] = {}
        self._masters: list[str] = []
        """By slot; "": no node has it. Empty until it was read."""
        self._replicas: set[str] = set()
        self._doubted: set[str] = set()
        """Nodes that failed and have not answered since."""
        self._reading = asyncio.Lock()
        self._times_read = 0
        self._texts: dict[str, str] = {}
        """Scripts by their hash."""
        self._next = random.randrange(2**20)
        self.answered: Callable[[str], None] = lambda node: None
        """Called with the node of each answer that is no error, before it is given."""
        pool = self._at(hosts[0]).connection_pool
        super().__init__(connection_pool=pool)
        self._encode = pool.get_encoder().encode

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await asyncio.gather(*(node.aclose() for node in self._nodes.values()), return_exceptions=True)

    def register_script(self, script: Any) -> Any:
        made = super().register_script(script)
        self._texts[made.sha] = script
        return made

    def pubsub(self, **options: Any) -> Any:
        """At one of the nodes in turn: a subscription lost with its node is made anew at another."""
        self._next += 1
        every = sorted(self._known() - self._doubted) or list(self._hosts)
        return self._at(every[self._next % len(every)]).pubsub(**options)

    def pipeline(self, transaction: bool = False, shard_hint: str | None = None) -> Pipeline:
        """Each node gets its commands in one message; there are no transactions."""
        if transaction:
            raise RedisError("a cluster's pipeline has no transactions")
        return _ClusterPipeline(self)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] == "PUBSUB NUMSUB":
            return await self._subscribers(args)
        return await self._repeated(args, options)

    async def info_of_servers(self, nodes: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        return await self.ask_nodes("INFO", "server", nodes=nodes)

    async def ask_nodes(self, *command: Any, nodes: Collection[str] | None = None) -> dict[str, Any]:
        """The answers of all masters, or of these nodes. Raises where one does not answer."""
        if nodes is None:
            await self._read_where(not self._masters or not self._doubted.isdisjoint(self._masters))
            nodes = sorted(set(self._masters) - {""})
        answers = await asyncio.gather(
            *(self._sent(node, command, {}) for node in nodes), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(nodes, answers, strict=True))

    async def scan_nodes(self, match: str, batch: int = 1_000) -> AsyncIterator[bytes]:
        """Keys of all masters; one that moves meanwhile may be missed, or come twice."""
        for node in await self.ask_nodes("PING"):
            async for key in self._at(node).scan_iter(match, batch):
                yield key

    async def together(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to all, errors among them; each node gets its commands in one message."""
        groups: dict[str, list[int]] = {}
        for index, (args, _) in enumerate(commands):
            slot = slot_of(args, self._encode)
            groups.setdefault("" if slot is None else await self._node_of(slot), []).append(index)
        answers: dict[int, Any] = {}

        async def send(node: str, indices: list[int]) -> None:
            if node:
                answers.update(zip(indices, await self._at_once(node, indices, commands), strict=False))
            lost: RedisError | None = None
            for index in indices:
                if index not in answers or isinstance(answers[index], REDIRECTED):
                    args, options = commands[index]
                    try:
                        # After one that was waited for in vain the others are not.
                        answers[index] = lost or await self.execute_command(*args, **options)
                    except RedisError as error:
                        answers[index] = error
                        lost = error if isinstance(error, LOST) else None

        await asyncio.gather(*(send(node, indices) for node, indices in groups.items()))
        return [answers[index] for index in range(len(commands))]

    async def _at_once(self, node: str, indices: list[int], commands: Sequence[Command]) -> list[Any]:
        """Empty where the connection was lost and all may be repeated."""
        pipe = self._at(node).pipeline(transaction=False)
        for index in indices:
            pipe.execute_command(*commands[index][0], **commands[index][1])
        try:
            came: list[Any] = await pipe.execute(raise_on_error=False)
        except LOST as error:
            self._doubted.add(node)
            return [] if self._repeats_lost else [error] * len(indices)
        if not all(isinstance(answer, Exception) for answer in came):
            self.answered(node)
        return came

    async def _repeated(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        loop, slot, asks, redirects = asyncio.get_running_loop(), slot_of(args, self._encode), "", 0
        ends_s, pause_s = loop.time() + self._timeout_s, FIRST_PAUSE_S
        while True:
            node = asks or await self._node_of(slot)
            try:
                return await self._sent(node, args, options, asks=bool(asks))
            except NoScriptError:
                if args[1] not in self._texts:
                    raise
                problem = await self._sent(node, ("SCRIPT LOAD", self._texts[args[1]]), {})
            except AskError as error:
                problem, asks = error, node_name(error.host, error.port, node)
                if isinstance(error, MovedError):
                    self._masters[error.slot_id], asks = asks, ""
            except LOST as error:
                if not self._repeats_lost or isinstance(error, AuthenticationError):
                    raise
                problem, asks, redirects = error, "", FREE_REDIRECTS
            except (TryAgainError, ClusterDownError) as error:
                self._doubted.add(node)
                problem, asks, redirects = error, "", FREE_REDIRECTS
            redirects += 1
            if redirects > FREE_REDIRECTS:
                if loop.time() + pause_s > ends_s:
                    raise Disconnected(f"the cluster does not answer: {problem}")
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _sent(
        self, node: str, args: Sequence[Any], options: Mapping[str, Any], *, asks: bool = False
    ) -> Any:
        client = self._at(node)
        try:
            if asks:
                pipe = client.pipeline(transaction=False)
                pipe.execute_command("ASKING")
                pipe.execute_command(*args, **options)
                _, answer = await pipe.execute(raise_on_error=False)
            else:
                answer = await client.execute_command(*args, **options)
        except LOST:
            self._doubted.add(node)
            raise
        self._doubted.discard(node)
        if isinstance(answer, Exception):
            raise answer
        self.answered(node)
        return answer

    async def _subscribers(self, args: Sequence[Any]) -> Any:
        """PUBSUB NUMSUB of all nodes together. Subscriptions at a node that does not answer are lost."""
        await self._read_where(True)  # others may know of nodes that are new
        counted = await asyncio.gather(
            *(self._sent(node, args, {}) for node in self._known()), return_exceptions=True
        )
        sums: dict[Any, int] = {}
        for found in counted:
            for channel, number in () if isinstance(found, BaseException) else found:
                sums[channel] = sums.get(channel, 0) + number
        if not sums:
            raise Disconnected("no node of the cluster counts its subscriptions")
        return list(sums.items())

    # ------------------------------------------------------------ nodes

    def _at(self, node: str) -> Any:
        if node not in self._nodes:
            self._nodes[node] = self._open_node(node)
        return self._nodes[node]

    def _known(self) -> set[str]:
        return ({*self._masters} | self._replicas) - {""} or set(self._hosts)

    async def _node_of(self, slot: int | None) -> str:
        if slot is None:
            await self._read_where(not self._masters)
            return random.choice(sorted(set(self._masters) - self._doubted - {""}) or list(self._hosts))
        await self._read_where(not self._masters or self._masters[slot] in {"", *self._doubted})
        if not (node := self._masters[slot]):
            raise Disconnected(f"no node of the cluster has slot {slot}")
        return node

    async def _read_where(self, is_due: bool) -> None:
        """Learns which node has which slots, from the first node that answers; once for all that wait."""
        if not is_due:
            return
        seen, problem = self._times_read, "no node answers"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s), self._reading:
                every = {*self._known(), *self._hosts}
                for node in sorted(every, key=lambda node: (node in self._doubted, random.random())):
                    if self._times_read != seen:
                        return
                    try:
                        async with asyncio.timeout(self._timeout_s / PATIENCE):
                            found = await self._at(node).execute_command("CLUSTER SLOTS")
                    except (RedisError, OSError, TimeoutError) as error:
                        self._doubted.add(node)
                        problem = f"{node}: {error}"
                        continue
                    if found:
                        self._masters, self._replicas = nodes_of_slots(found, node)
                        self._doubted &= self._known()
                        self._times_read += 1
        if self._times_read == seen:
            raise Disconnected(f"the cluster's slots could not be read: {problem}")


class _ClusterPipeline(Pipeline):
    def __init__(self, cluster: ClusterRedis) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, False, None)
        self._cluster = cluster

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands, self.command_stack = self.command_stack, []
        answers = await self._cluster.together(commands)
        for answer in answers if raise_on_error else ():
            if isinstance(answer, Exception):
                raise answer
        return answers
