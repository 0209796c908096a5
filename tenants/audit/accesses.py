"""Accesses as the audit has them: log-ins, refused attempts, reads, merged so that no flood fills the log.

Pure; the time is passed in. One action, actor, address and target has one row a minute, of reads one an hour,
with a count. Beyond `MOST_OF_A_KIND` rows of one action and kind of actor, the rest of that minute is one
row, `others`. What does not fit into the buffer is counted in a row, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
MOST_OF_A_KIND = 100
MOST_READS = 2_000
MOST_WAITING = 10_000
"""Rows."""
MOST_REASONS = 20
OTHERS = "others"
SEVERAL = "several"
READ = "access.read"
DROP = "access.drop"
_AT_ONCE = ("server.start", "server.stop")
"""Actions of the server itself, which are never merged."""


@dataclass(frozen=True, slots=True)
class Access:
    action: str
    actor: str
    """A person by name (`person:ada`), whether there is one or not."""
    origin: str = ""
    target: str = "console"
    why: str = ""
    """Why it was refused: one word of ours."""
    request_id: str = ""
    trace_id: str = ""


@dataclass(slots=True)
class MergedAccess:
    """An access, and how often it was made."""

    access: Access
    first_us: int
    last_us: int
    ends_us: int
    """From then on it is written."""
    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, access: Access, now_us: int) -> None:
        self.count += 1
        self.last_us = now_us
        if access.why and (access.why in self.reasons or len(self.reasons) < MOST_REASONS):
            self.reasons[access.why] = self.reasons.get(access.why, 0) + 1
        if access.origin != self.access.origin and self.access.origin != SEVERAL:
            self.access = replace(self.access, origin=SEVERAL)


class AccessBuffer:
    """Accesses that wait to be written. Not for several threads."""

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._rows: dict[tuple[str, ...], MergedAccess] = {}
        """By action, kind of actor, end, actor, origin and target; in the order in which they began."""
        self._in_kind: dict[tuple[str, ...], int] = {}
        """How many rows there are of an action, a kind of actor and an end."""
        self.dropped = 0
        """Accesses that found no room since the last `take`."""

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, access: Access, now_us: int) -> None:
        is_read = access.action == READ
        every_us = HOUR_US if is_read else MINUTE_US
        ends_us = now_us if access.action in _AT_ONCE else now_us - now_us % every_us + every_us
        kind = (access.action, access.actor.partition(":")[0], str(ends_us))
        key = (*kind, access.actor, "" if is_read else access.origin, access.target)
        row = self._rows.get(key)
        if row is None and self._in_kind.get(kind, 0) >= (MOST_READS if is_read else MOST_OF_A_KIND):
            access = replace(access, actor=OTHERS, origin=OTHERS, target=OTHERS, request_id="", trace_id="")
            key = (*kind, OTHERS, OTHERS, OTHERS)
            row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._most_waiting:
                self.dropped += 1
                return
            row = self._rows[key] = MergedAccess(access, now_us, now_us, ends_us)
            self._in_kind[kind] = self._in_kind.get(kind, 0) + 1
        row.add(access, now_us)

    def take(self, now_us: int, most: int, *, is_last: bool = False) -> Sequence[MergedAccess]:
        """Takes up to `most` ended rows (`is_last`: any), oldest first; the last counts dropped accesses."""
        over = [key for key, row in self._rows.items() if is_last or row.ends_us <= now_us][:most]
        taken = [self._rows.pop(key) for key in over]
        for key in over:
            kind = key[:3]
            self._in_kind[kind] -= 1
            if not self._in_kind[kind]:
                del self._in_kind[kind]
        if self.dropped and len(taken) < most:
            lost = MergedAccess(Access(DROP, "system", target="audit"), now_us, now_us, now_us, self.dropped)
            self.dropped = 0
            return [*taken, lost]
        return taken
