"""Report of one fast path: used or not, and why. `fairgate doctor` prints them."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.dispatch import AttentionChoice


@dataclass(frozen=True, slots=True)
class PathReport:
    """Verdict on one fast path."""

    name: str
    chosen: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {'used' if self.chosen else 'not used'}, {self.reason}"


def attention_reports(choice: AttentionChoice) -> tuple[PathReport, ...]:
    """The kernels that were passed over, then the one that serves."""
    passed_over = (PathReport(f"attention {name}", False, reason) for name, reason in choice.passed_over)
    return *passed_over, PathReport(f"attention {choice.kernel.name}", True, choice.kernel.reason)


class Unsupported(Exception):
    """A fast path cannot be used with this model or on this machine; the message says why."""
