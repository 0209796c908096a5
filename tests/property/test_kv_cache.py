"""Whatever sequences do, each table holds the keys and values of its own tokens, and no block is lost.

Random histories of a small engine: its memory holds, for every slot, what a KV cache would hold (a function
of the salt and of all tokens up to the slot). Before a sequence reads its context, that is compared; so a
block that was published too early, found under another salt, written by two, freed too early or restored
wrongly shows. Beside it a plain twin, a dictionary of prefixes, says what has to be found, cached, evicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from engine.kv.blocks import OutOfBlocks, blocks_for
from engine.kv.cache import KvCache
from engine.kv.host import SwapOut
from engine.kv.prefix import Match, PrefixCursor

Prefix = tuple[str, tuple[int, ...]]


@dataclass(eq=False)
class Run:
    """A sequence."""

    token_ids: list[int]
    cursor: PrefixCursor
    table: list[int] = field(default_factory=list)
    computed: int = 0
    granted: int = 0
    swapped: SwapOut | None = None


class Twin:
    """The published prefixes by name: those held, with how many hold them, and those let go, oldest first."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.held: Counter[Prefix] = Counter()
        self.cached: list[Prefix] = []
        self.fenced: list[Prefix] | None = None

    def name(self, run: Run, blocks: int) -> Prefix:
        return run.cursor.salt, tuple(run.token_ids[: blocks * self.block_tokens])

    def names(self, run: Run, blocks: int) -> list[Prefix]:
        return [self.name(run, depth) for depth in range(1, blocks + 1)]

    def published(self) -> set[Prefix]:
        return {*self.held, *self.cached, *(self.fenced or [])}

    def longest(self, run: Run, most_tokens: int) -> int:
        """Blocks that a lookup has to find."""
        known = self.published()
        blocks = 0
        while (blocks + 1) * self.block_tokens <= most_tokens and self.name(run, blocks + 1) in known:
            blocks += 1
        return blocks

    def hold(self, names: list[Prefix]) -> None:
        for name in names:
            if not self.held[name]:
                for pile in (self.cached, self.fenced or []):
                    if name in pile:
                        pile.remove(name)
            self.held[name] += 1

    def let_go(self, names: list[Prefix]) -> None:
        for name in reversed(names):
            self.held[name] -= 1
            if not self.held[name]:
                del self.held[name]
                (self.cached if self.fenced is None else self.fenced).append(name)

    def lift(self) -> None:
        self.cached += self.fenced or []
        self.fenced = None


class History:
    """A random engine: admits, computes, preempts, swaps and cancels, and compares after every act."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.block_tokens = random.choice([1, 2, 3, 4])
        self.num_blocks = random.randint(4, 24)
        self.cache = KvCache(
            self.num_blocks, self.block_tokens, num_host_blocks=random.choice([0, 3, 12, 24])
        )
        self.twin = Twin(self.block_tokens)
        self.device = [0] * (self.num_blocks * self.block_tokens)
        self.host = [0] * (self.cache.num_host_blocks * self.block_tokens)
        self.running: list[Run] = []
        self.waiting: list[Run] = []
        self.known: dict[Run, Match] = {}
        self.met: Counter[str] = Counter()
        self.fenced_blocks: set[int] = set()

    # ------------------------------------------------------------ what a model would keep

    def content(self, run: Run, position: int) -> int:
        return hash((run.cursor.salt, tuple(run.token_ids[: position + 1])))

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_tokens] * self.block_tokens + position % self.block_tokens

    def read(self, run: Run) -> None:
        for position in range(run.computed):
            kept = self.device[self.slot(run.table, position)]
            assert kept == self.content(run, position), f"token {position} is another sequence's"

    def write(self, run: Run) -> None:
        for position in range(run.computed, run.computed + run.granted):
            self.device[self.slot(run.table, position)] = self.content(run, position)

    def copy(self) -> None:
        copies = self.cache.close_step()
        size = self.block_tokens
        for device, host in copies.out:
            self.host[host * size : (host + 1) * size] = self.device[device * size : (device + 1) * size]
        for host, device in copies.back:
            self.device[device * size : (device + 1) * size] = self.host[host * size : (host + 1) * size]

    # ------------------------------------------------------------ one step

    def step(self) -> None:
        random = self.random
        for _ in range(random.randint(0, 2)):
            self.waiting.append(self.arrival())
        for run in list(self.running):
            self.adopt(run)
        for run in list(self.running):
            if run in self.running:
                self.grant(run)
        while self.waiting and self.admit(self.waiting[0]):
            pass
        if self.running and random.random() < 0.15:
            self.give_way(random.choice(self.running))
        if self.running and random.random() < 0.1:
            self.finish(random.choice(self.running))
            self.met["cancelled while a step is put together"] += 1
        self.copy()
        self.compare()
        self.execute()
        self.compare()

    def arrival(self) -> Run:
        """Prompts over two tokens and two salts, some the beginning of others: they meet often."""
        random = self.random
        most = self.num_blocks * self.block_tokens
        length = random.randint(1, max(1, min(most - 1, random.choice([6, 40]))))
        stem = Random(random.randint(0, 2))
        tokens = [stem.randint(1, 9) for _ in range(length)]
        if random.random() < 0.3:
            tokens[random.randrange(length)] = random.randint(1, 9)
        return Run(tokens, PrefixCursor(random.choice(["a", "a", "b"])))

    def admit(self, run: Run) -> bool:
        """The head of the line; False: it has to wait."""
        total = len(run.token_ids)
        most = total - 1 if run.swapped is None else run.swapped.tokens
        match = self.cache.match(run.token_ids, run.cursor.salt, most, self.known.get(run))
        self.known[run] = match
        depth = len(match.nodes)
        assert depth == self.twin.longest(run, most), "not the longest published prefix"
        if run.swapped is None and self.cache.defer(run.cursor, run.token_ids, 0, match):
            self.met["a candidate waited"] += 1
            return False
        count = blocks_for(total, self.block_tokens)
        victims = self.random.sample(self.running, self.random.randint(0, len(self.running)))
        victims = [] if self.random.random() < 0.7 else victims
        shortage = self.cache.shortage(match, count, [victim.table for victim in victims])
        if shortage > 0:
            return False
        for victim in victims:
            self.preempt(victim)
        if victims:
            self.met["made room for a candidate"] += 1
            if not match.is_current:
                raise AssertionError("making room evicted a match")
        self.waiting.remove(run)
        self.cache.attach(run.table, run.cursor, match)
        self.twin.hold(self.twin.names(run, depth))
        run.computed = match.tokens
        self.met["hit"] += bool(match.tokens)
        free = self.cache.num_free
        if run.swapped is not None:
            run.computed = run.swapped.tokens
            self.extending(run, lambda swapped=run.swapped: self.cache.swap_in(swapped, run.table))
            self.met["swapped in"] += 1
            self.met["swapped in behind a match"] += bool(match.tokens)
            run.swapped = None
        self.extending(run, lambda: self.cache.extend(run.table, count - len(run.table)))
        assert self.cache.num_free == free - (count - depth), "the shortage was not what it took"
        self.running.append(run)
        self.grant(run)
        return True

    def extending(self, run: Run, extend: object) -> None:
        """Runs an allocation, and lets the twin evict as many as it should have."""
        before, held = self.cache.num_blank, len(run.table)
        assert callable(extend)
        extend()
        for block in run.table[held:]:
            assert block not in self.fenced_blocks, "a block behind the fence was handed out"
        evicted = max(0, len(run.table) - held - before)
        for name in self.twin.cached[:evicted]:
            inside = [each for each in self.twin.published() if each[0] == name[0] and each != name]
            assert not any(each[1][: len(name[1])] == name[1] for each in inside), "a parent went first"
            self.twin.cached.remove(name)
        self.met["evicted"] += evicted

    def adopt(self, run: Run) -> None:
        depth = run.cursor.blocks
        expected = max(depth, self.twin.longest(run, len(run.token_ids) - 1))
        gained = self.cache.adopt(run.table, run.cursor, run.token_ids, run.computed, len(run.token_ids) - 1)
        if run.computed // self.block_tokens != depth:
            assert gained == 0
        else:
            assert run.cursor.blocks == expected
            assert gained == (expected * self.block_tokens - run.computed if expected > depth else 0)
        self.twin.hold(self.twin.names(run, run.cursor.blocks)[depth:])
        run.computed += gained
        assert run.computed < len(run.token_ids), "no token is left to compute"
        self.met["adopted"] += bool(gained)
        self.met["adopted in the middle of a block"] += bool(gained % self.block_tokens)

    def grant(self, run: Run) -> None:
        if self.cache.defer(run.cursor, run.token_ids, run.computed):
            self.met["a runner waited"] += 1
            return
        run.granted = min(len(run.token_ids) - run.computed, self.random.choice([0, 1, 1, 3, 8, 40]))
        while True:
            wanted = blocks_for(run.computed + run.granted, self.block_tokens) - len(run.table)
            try:
                self.extending(run, lambda wanted=wanted: self.cache.extend(run.table, max(0, wanted)))
                break
            except OutOfBlocks:
                assert wanted > self.cache.num_free
                others = [other for other in self.running if other is not run]
                assert others, "the last one running could not have all blocks"
                self.preempt(self.random.choice(others))
        self.cache.announce(run.cursor, run.token_ids, run.computed, run.granted)
        if self.random.random() < 0.1:
            self.cache.retract(run.cursor)
            run.granted = 0

    def give_way(self, run: Run) -> None:
        names = self.twin.names(run, run.cursor.blocks)
        room = self.cache.num_host_free
        swapped = self.cache.swap_out(run.table, run.cursor, run.computed)
        if swapped is None:
            self.met["no room on the host"] += blocks_for(run.computed, self.block_tokens) > room
            self.preempt(run)
            return
        self.met["swapped out"] += 1
        self.twin.let_go(names)
        self.running.remove(run)
        run.granted = run.computed = 0
        run.swapped = swapped
        self.waiting.insert(0, run)

    def preempt(self, run: Run) -> None:
        self.finish(run)
        self.waiting.insert(0, run)
        self.met["preempted"] += 1

    def finish(self, run: Run) -> None:
        self.twin.let_go(self.twin.names(run, run.cursor.blocks))
        self.cache.free(run.table, run.cursor)
        self.running.remove(run)
        run.granted = run.computed = 0

    def execute(self) -> None:
        """The step runs on what it was handed; meanwhile some are cancelled."""
        handed = [(run, list(run.table)) for run in self.running if run.granted]
        before = {run: (run.computed, run.granted) for run, _ in handed}
        self.cache.fence(1)
        self.twin.fenced = []
        gone: list[Run] = []
        for run in self.running + self.waiting:
            if self.random.random() < 0.05:
                gone.append(run)
        for run in gone:
            if run in self.running:
                self.fenced_blocks.update(
                    block for block in run.table if sum(block in each.table for each in self.running) == 1
                )
                self.finish(run)
                self.met["cancelled while a step runs"] += 1
            else:
                self.waiting.remove(run)
                if run.swapped is not None:
                    self.cache.drop(run.swapped)
                    self.met["dropped on the host"] += 1
        if self.waiting and self.random.random() < 0.3:
            # The next step is put together while this one runs.
            self.met["admitted behind the fence"] += self.admit_behind_the_fence(self.waiting[0])
        self.compare()
        for run, table in handed:
            current, run.table = run.table, table
            now, (run.computed, run.granted) = (run.computed, run.granted), before[run]
            self.read(run)
            self.write(run)
            run.table, (run.computed, run.granted) = current, now
        for run, _ in handed:
            if run not in self.running:
                continue
            run.computed += run.granted
            run.granted = 0
            depth = run.cursor.blocks
            shared = self.cache.counts.duplicate_blocks
            self.cache.publish(run.table, run.cursor, run.token_ids, run.computed)
            assert run.cursor.blocks == run.computed // self.block_tokens
            self.met["duplicate"] += self.cache.counts.duplicate_blocks - shared
            self.twin.hold(self.twin.names(run, run.cursor.blocks)[depth:])
            self.read(run)
            if run.computed == len(run.token_ids):
                most = self.num_blocks * self.block_tokens
                if self.random.random() < 0.3 or len(run.token_ids) >= most - 1:
                    self.finish(run)
                    self.met["finished"] += 1
                else:
                    run.token_ids.append(self.random.randint(1, 9))
        self.met["fenced"] += self.cache.num_fenced
        self.cache.lift_fence(1)
        self.twin.lift()
        self.fenced_blocks.clear()

    def admit_behind_the_fence(self, run: Run) -> bool:
        if run.swapped is not None:
            return False
        match = self.cache.match(run.token_ids, run.cursor.salt, len(run.token_ids) - 1)
        depth = len(match.nodes)
        assert depth == self.twin.longest(run, len(run.token_ids) - 1)
        count = blocks_for(len(run.token_ids), self.block_tokens)
        if self.cache.shortage(match, count) > 0:
            return False
        self.waiting.remove(run)
        self.fenced_blocks.difference_update(match.blocks)
        self.cache.attach(run.table, run.cursor, match)
        self.twin.hold(self.twin.names(run, depth))
        run.computed = match.tokens
        self.extending(run, lambda: self.cache.extend(run.table, count - len(run.table)))
        self.running.append(run)
        return True

    # ------------------------------------------------------------ the comparison

    def compare(self) -> None:
        cache, twin = self.cache, self.twin
        runs = self.running + self.waiting
        cache.check([(run.table, run.cursor) for run in runs], [run.swapped for run in runs if run.swapped])
        assert cache.num_published == len(twin.published())
        assert cache.num_cached == len(twin.cached)
        assert (
            cache.num_blank + cache.num_cached + cache.num_referenced + cache.num_fenced == cache.num_blocks
        )
        assert cache.num_free == cache.num_blank + cache.num_cached
        assert cache.num_referenced == len({block for run in runs for block in run.table})
        for run in self.running:
            assert run.computed <= len(run.table) * self.block_tokens

    def drain(self) -> None:
        """Everybody goes: nothing but the cache may be left."""
        for run in list(self.running):
            self.finish(run)
        for run in self.waiting:
            if run.swapped is not None:
                self.cache.drop(run.swapped)
        self.running, self.waiting = [], []
        self.cache.close_step()
        self.compare()
        assert self.cache.num_free == self.num_blocks
        assert self.cache.num_host_free == self.cache.num_host_blocks
        self.met["revived"] += self.cache.counts.revived_blocks
        assert self.cache.counts.evicted_blocks == self.met["evicted"]
        assert self.cache.num_cached == len(self.twin.published())
        self.cache._evict(self.cache.num_cached)
        assert (self.cache.num_blank, self.cache.num_published) == (self.num_blocks, 0)


MUST_BE_MET = {
    "hit",
    "adopted",
    "adopted in the middle of a block",
    "a candidate waited",
    "a runner waited",
    "made room for a candidate",
    "evicted",
    "revived",
    "duplicate",
    "preempted",
    "swapped out",
    "swapped in",
    "swapped in behind a match",
    "no room on the host",
    "dropped on the host",
    "fenced",
    "cancelled while a step is put together",
    "cancelled while a step runs",
    "admitted behind the fence",
    "finished",
}


def test_random_histories_agree_with_a_dictionary_of_prefixes() -> None:
    met: Counter[str] = Counter()
    for seed in range(150):
        history = History(seed)
        for _ in range(60):
            history.step()
        history.drain()
        met += history.met
    assert met.keys() >= MUST_BE_MET, f"never met: {sorted(MUST_BE_MET - met.keys())}"
    assert min(met[name] for name in MUST_BE_MET) >= 20, met


@pytest.mark.parametrize("seed", [1, 2])
def test_a_history_is_the_same_each_time(seed: int) -> None:
    def blocks() -> list[list[int]]:
        history = History(seed)
        for _ in range(40):
            history.step()
        return [list(run.table) for run in history.running]

    assert blocks() == blocks()
