"""The table of choices in `docs/policies.md`: `python -m ops.settings.policy_document`.

It writes the table into the page.
"""

from __future__ import annotations

from pathlib import Path

from engine.scheduling.policy import CHOICES

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
TESTS = "tests/e2e/test_policy_options.py"
ELSEWHERE = {"policy.learned_table": "tests/e2e/test_policy_learned.py"}
"""Files of tests that show options which the policy of a gateway alone reads."""
BEGIN, END = "<!-- choices: begin -->\n", "<!-- choices: end -->\n"
HEAD = """\
| choice | meaning |
|---|---|
"""

CHOICE_WORDS: dict[str, dict[str, str]] = {
    "order": {
        "fcfs": "the one that came first",
        "hrrn": "highest response ratio: waited for, by its size",
        "sjf": "fewest predicted tokens, aged",
        "srpt": "fewest predicted tokens left, aged; interrupts",
        "las": "least attained service; interrupts",
        "mlfq": "the highest of several levels with growing quanta; interrupts",
        "priority": "smallest score of tier, urgency, history and length",
        "edf": "earliest deadline",
        "drr": "turns of tenants, a quantum each",
        "dlpm": "turns of tenants; inside a tenant the longest prefix in the cache",
        "vtc": "the tenant that had least service by weight",
        "hybrid": "the tenant that had least service by weight; inside a tenant the highest response ratio",
        "buckets": "requests of like length together, bucket by bucket",
    },
    "admit": {
        "static": "batches that run to completion",
        "dynamic": "batches that begin when they are full or `window_s` is over",
        "buckets": "batches of like length; short ones suspend long ones",
        "prompt-only": "each that fits with its prompt: no memory is set aside for answers",
        "predicted-reserve": "each that fits with its prompt and a part of what it will probably add",
        "peak": "each with which the probable peak of all still fits",
        "table": "batches that begin and wait as a solved table says",
    },
    "compose": {
        "decode-first": "a token for each running answer, the rest for prompts",
        "token-fair": "tokens of answers and prompts are shared between tenants by weight",
        "slack": "answers that are ahead of their targets lend their tokens to prompts that would be late",
        "lanes": "a step advances prompts or answers, not both",
    },
    "evict": {
        "fair-victim": "of the lowest tier the tenant that had most service",
        "latest-victim": "of the lowest tier the one that was admitted last",
        "attained-victim": "of the lowest tier the one that had most service",
    },
}
"""What each choice does, in a line."""


def table() -> str:
    return HEAD + "".join(
        f"| {decision} `{choice}` | {CHOICE_WORDS[decision][choice]} |\n"
        for decision, named in CHOICES.items()
        for choice in sorted(named)
    )


def page(text: str) -> str:
    """The page with the table as it should be. Raises ValueError where it has no place for it."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no {BEGIN.strip()} and {END.strip()}")
    return before + begin + table() + end + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
