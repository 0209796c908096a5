"""Moves of control loops."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, String, Table, Text

from tenants.storage.tables.base import ID, WORD, metadata

# Made or advised, each with its reason. Purged by age and number.
control_moves = Table(
    "control_moves",
    metadata,
    Column("move_id", ID, primary_key=True),
    Column("at_us", BigInteger, nullable=False),
    Column("gateway_id", ID, nullable=False),
    Column("model", String(256), nullable=False),
    Column("knob", String(32), nullable=False),
    Column("before", Float, nullable=False),
    Column("after", Float, nullable=False),
    Column("reason", String(200), nullable=False),
    Column("is_made", Boolean, nullable=False),
    # Of the control loop then.
    Column("mode", WORD, nullable=False),
    # JSON: where all knobs stood afterwards.
    Column("knobs", Text, nullable=False),
    Index("ix_control_moves_at_us_move_id", "at_us", "move_id"),
    *(
        Index(f"ix_control_moves_{name}_at_us_move_id", name, "at_us", "move_id")
        for name in ("model", "knob")
    ),
)
