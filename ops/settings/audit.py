"""Settings of the audit's checkpoints, and of the ledger's digests in it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from engine.bounds import Bounded


class AuditSettings(Bounded, frozen=True, kw_only=True):
    """How often the audit is signed and checked, and the ledger digested."""

    checkpoint_rows: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        "After so many new rows the audit gets a signed checkpoint. Where a row was changed, the check names"
        " the rows between two checkpoints.",
    ] = 100
    checkpoint_s: Annotated[
        float,
        Meta(ge=1, le=86_400),
        "A new row of the audit is signed after so long at the latest.",
    ] = field(default=60.0, name="checkpoint_every")
    ledger_s: Annotated[
        float,
        Meta(ge=1, le=86_400),
        "The audit gets a digest of new rows of the ledger after so long, or of each 10,000 of them. Until"
        " then it does not show that one of them was changed.",
    ] = field(default=600.0, name="ledger_every")
    verify_s: Annotated[
        float,
        Meta(ge=60, le=2_678_400),
        "The whole audit is checked at the start and after so long, as `fairgate audit verify` does it;"
        " damage is an alert.",
    ] = field(default=86_400.0, name="verify_every")
