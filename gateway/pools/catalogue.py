"""Model names: pools and their aliases. Pure.

A *pool* is the replicas of one model, with one queue. A name is a pool's own or an alias: of weighted pools,
or of a chain (`chain_walk.py`), whose next pool takes what the previous cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tenants.errors import Invalid
from tenants.nouns.alias import MAX_WEIGHT, Alias, Chain

MAX_NAMES = 1_000


class Catalogue:
    def __init__(self, pools: Sequence[str], aliases: Mapping[str, Alias]) -> None:
        if len(pools) + len(aliases) > MAX_NAMES:
            raise Invalid("aliases", f"there are more than {MAX_NAMES} names of models")
        self._targets: dict[str, tuple[tuple[str, int], ...]] = {name: ((name, 1),) for name in pools}
        self.aliases = dict(aliases)
        self._chains = {name: means for name, means in aliases.items() if isinstance(means, Chain)}
        for alias, means in aliases.items():
            if alias in pools:
                raise Invalid("aliases", f"{alias!r} is the name of a model: give the alias another one")
            weights = dict.fromkeys(means.pools, 1) if isinstance(means, Chain) else means
            for pool, weight in weights.items():
                known = ", ".join(sorted(pools))
                if pool in aliases and isinstance(means, Chain):
                    raise Invalid(
                        "aliases",
                        f"the chain of {alias!r} names the alias {pool!r}, and so could go in a circle: name"
                        f" models in it; there are {known}",
                    )
                if pool not in pools:
                    raise Invalid(
                        "aliases", f"{alias!r} means {pool!r}, which is no model here; there are {known}"
                    )
                if not 0 <= weight <= MAX_WEIGHT:
                    raise Invalid("aliases", f"the weight of {pool!r} in {alias!r} must be 0 to {MAX_WEIGHT}")
            if not any(weights.values()):
                raise Invalid("aliases", f"{alias!r} means nothing: name a model with a weight above 0")
            self._targets[alias] = tuple(weights.items())

    def names(self) -> list[str]:
        return list(self._targets)

    def targets(self, name: str) -> tuple[tuple[str, int], ...]:
        """Pools and weights of a name; those of a chain in order. Raises `KeyError`."""
        return self._targets[name]

    def chain(self, name: str) -> Chain | None:
        """None: the name is no chain's."""
        return self._chains.get(name)

    def choose(self, name: str, draw: float, is_up: Callable[[str], bool]) -> str:
        """By weight, preferring pools that serve; `draw` is uniform in [0, 1). Raises `KeyError`."""
        targets = self._targets[name]
        if len(targets) == 1:
            return targets[0][0]
        weighted = [target for target in targets if target[1] > 0]
        serving = [target for target in weighted if is_up(target[0])] or weighted
        point = draw * sum(weight for _, weight in serving)
        for pool, weight in serving:
            point -= weight
            if point < 0:
                return pool
        return serving[-1][0]


def merged(
    pools: Sequence[str], of_settings: Mapping[str, Alias], stored: Mapping[str, Alias]
) -> tuple[Catalogue, dict[str, str]]:
    """With each stored alias in place of the settings' of its name; and, by name, why one is left out: a
    gateway need not have every model."""
    aliases, left_out = dict(of_settings), {}
    for name, means in stored.items():
        aliases.pop(name, None)
        try:
            Catalogue(pools, {name: means})
        except Invalid as error:
            left_out[name] = error.message
        else:
            aliases[name] = means
    return Catalogue(pools, aliases), left_out
