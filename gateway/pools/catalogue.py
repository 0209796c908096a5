"""Model names: pools and their aliases.

A *pool* is the replicas of one model, with one queue. A name is a pool's own, or an alias of one or several
pools with weights. Pure: which of an alias's pools a request gets is drawn by its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tenants.errors import Invalid

MAX_NAMES = 1_000
MAX_WEIGHT = 1_000_000


class Catalogue:
    """Names and what stands behind them."""

    def __init__(self, pools: Sequence[str], aliases: Mapping[str, Mapping[str, int]]) -> None:
        """`aliases`: name to weights of pools; a weight of 0 is a pool that gets nothing. Raises
        `Invalid`."""
        if len(pools) + len(aliases) > MAX_NAMES:
            raise Invalid("aliases", f"there are more than {MAX_NAMES} names of models")
        self._targets: dict[str, tuple[tuple[str, int], ...]] = {name: ((name, 1),) for name in pools}
        for alias, weights in aliases.items():
            if alias in pools:
                raise Invalid("aliases", f"{alias!r} is the name of a model: give the alias another one")
            for pool, weight in weights.items():
                if pool not in pools:
                    known = ", ".join(sorted(pools))
                    raise Invalid(
                        "aliases", f"{alias!r} means {pool!r}, which is no model here; there are {known}"
                    )
                if not 0 <= weight <= MAX_WEIGHT:
                    raise Invalid("aliases", f"the weight of {pool!r} in {alias!r} must be 0 to {MAX_WEIGHT}")
            if not any(weights.values()):
                raise Invalid("aliases", f"{alias!r} means nothing: name a model with a weight above 0")
            self._targets[alias] = tuple(weights.items())

    def names(self) -> list[str]:
        """Every name, the models' own first."""
        return list(self._targets)

    def targets(self, name: str) -> tuple[tuple[str, int], ...]:
        """Pools and weights of a name. Raises `KeyError`."""
        return self._targets[name]

    def choose(self, name: str, draw: float, is_up: Callable[[str], bool]) -> str:
        """The pool for a request, by weight; `draw` is uniform in [0, 1). Pools that serve now go before
        those that do not. Raises `KeyError`."""
        targets = self._targets[name]
        if len(targets) == 1:
            return targets[0][0]
        weighted = [each for each in targets if each[1] > 0]
        serving = [each for each in weighted if is_up(each[0])] or weighted
        point = draw * sum(weight for _, weight in serving)
        for pool, weight in serving:
            point -= weight
            if point < 0:
                return pool
        return serving[-1][0]
