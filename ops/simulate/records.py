"""Records of requests in columns of numbers, up to 100 bytes a request."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from ops.simulate.traffic.requests import SimulatedRequest

NEVER_S = -1.0


class Records:
    """One row a request, in order of arrival; instants on the virtual clock, `NEVER_S` until they come."""

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.weights: dict[str, float] = {}
        self.tenant = array("l")
        self.arrival_s = array("d")
        self.input_tokens = array("l")
        self.output_tokens = array("l")
        self.dispatched_s = array("d")
        self.first_s = array("d")
        self.last_s = array("d")
        self.cached_tokens = array("l")
        self.preemptions = array("l")
        self.recomputed_tokens = array("l")
        self.displaced_tokens = array("i")
        """KV tokens of lower tiers whose places it took."""
        self.set_back = array("h")
        """Places that it lost to a tenant of its tier that was owed one."""
        self.replica = array("h")
        self.refused = array("b")
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.tenant)

    def arrive(self, request: SimulatedRequest) -> int:
        """A new row; returns its number."""
        number = self._numbers.get(request.tenant)
        if number is None:
            number = self._numbers[request.tenant] = len(self.tenants)
            self.tenants.append(request.tenant)
        self.weights[request.tenant] = request.weight
        self.tenant.append(number)
        self.arrival_s.append(request.arrival_s)
        self.input_tokens.append(request.input_tokens)
        self.output_tokens.append(request.output_tokens)
        for instants in (self.dispatched_s, self.first_s, self.last_s):
            instants.append(NEVER_S)
        for counts in (
            self.cached_tokens,
            self.preemptions,
            self.recomputed_tokens,
            self.displaced_tokens,
            self.set_back,
            self.replica,
            self.refused,
        ):
            counts.append(0)
        return len(self.tenant) - 1

    def rows_of(self, tenant: str) -> list[int]:
        return self.rows_by_tenant().get(tenant, [])

    def rows_by_tenant(self) -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {tenant: [] for tenant in self.tenants}
        lists = [rows[tenant] for tenant in self.tenants]
        for row, number in enumerate(self.tenant):
            lists[number].append(row)
        return rows

    def ttft_s(self, row: int) -> float:
        """From arrival to the first token; infinite if none came."""
        first_s = self.first_s[row]
        return first_s - self.arrival_s[row] if first_s >= 0 else float("inf")

    def e2e_s(self, row: int) -> float:
        """From arrival to the last token; infinite if the answer is not complete."""
        last_s = self.last_s[row]
        return last_s - self.arrival_s[row] if last_s >= 0 else float("inf")

    def tpot_s(self, row: int) -> float:
        """Time per output token after the first; 0 for one token, infinite if it is not complete."""
        if self.last_s[row] < 0:
            return float("inf")
        return (self.last_s[row] - self.first_s[row]) / max(1, self.output_tokens[row] - 1)

    def done(self) -> Iterator[int]:
        return (row for row, last_s in enumerate(self.last_s) if last_s >= 0)
