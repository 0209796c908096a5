"""Limit events, overrides, thresholds, versioned prices, weights, GPU time, what a low budget does."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('tenants', sa.Column('on_low_budget', sa.String(length=16), server_default='refuse', nullable=False))
    op.add_column('limits', sa.Column('thresholds', sa.JSON(none_as_null=True), nullable=True))
    op.create_table('limit_overrides',
    sa.Column('limit_id', sa.String(length=40), nullable=False),
    sa.Column('amount', sa.BigInteger(), nullable=False),
    sa.Column('rate_milli', sa.BigInteger(), nullable=True),
    sa.Column('until_us', sa.BigInteger(), nullable=False),
    sa.Column('reason', sa.String(length=200), nullable=False),
    sa.Column('created_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['limit_id'], ['limits.id'], name=op.f('fk_limit_overrides_limit_id_limits')),
    sa.PrimaryKeyConstraint('limit_id', name=op.f('pk_limit_overrides'))
    )
    op.create_table('limit_events',
    sa.Column('limit_id', sa.String(length=40), nullable=False),
    sa.Column('window_start_s', sa.BigInteger(), nullable=False),
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('level', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('count', sa.BigInteger(), nullable=False),
    sa.Column('first_us', sa.BigInteger(), nullable=False),
    sa.Column('last_us', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('limit_id', 'window_start_s', 'kind', 'level', name=op.f('pk_limit_events'))
    )
    op.create_table('prices',
    sa.Column('version', sa.BigInteger(), autoincrement=False, nullable=False),
    sa.Column('model', sa.String(length=256), nullable=False),
    sa.Column('tier', sa.String(length=16), nullable=False),
    sa.Column('input_nanousd', sa.BigInteger(), nullable=False),
    sa.Column('cached_input_nanousd', sa.BigInteger(), nullable=False),
    sa.Column('output_nanousd', sa.BigInteger(), nullable=False),
    sa.Column('multiplier', sa.Integer(), nullable=False),
    sa.Column('input_weight', sa.Integer(), nullable=False),
    sa.Column('cached_input_weight', sa.Integer(), nullable=False),
    sa.Column('output_weight', sa.Integer(), nullable=False),
    sa.Column('reasoning_weight', sa.Integer(), nullable=False),
    sa.Column('created_us', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('version', 'model', 'tier', name=op.f('pk_prices'))
    )
    op.create_index('ix_prices_model_tier_version', 'prices', ['model', 'tier', 'version'], unique=False)
    # Adding a column fires no trigger: the rows that are there stay as they are.
    op.add_column('ledger', sa.Column('gpu_ms', sa.BigInteger(), server_default='0', nullable=False))
    op.add_column('ledger', sa.Column('counted_input', sa.BigInteger(), nullable=True))
    op.add_column('ledger', sa.Column('counted_output', sa.BigInteger(), nullable=True))
    op.add_column('ledger', sa.Column('price_version', sa.BigInteger(), server_default='0', nullable=False))
    _refuse_changes_of_prices()


def _refuse_changes_of_prices() -> None:
    """A version stays what it was: ledger rows name it."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER prices_no_{change} BEFORE {change.upper()} ON prices "
                "BEGIN SELECT RAISE(ABORT, 'prices is append-only'); END"
            )
        return
    op.execute(
        "CREATE TRIGGER prices_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON prices "
        "FOR EACH STATEMENT EXECUTE FUNCTION fairgate_append_only()"
    )


def downgrade() -> None:
    for column in ("price_version", "counted_output", "counted_input", "gpu_ms"):
        op.drop_column('ledger', column)
    op.drop_index('ix_prices_model_tier_version', table_name='prices')
    op.drop_table('prices')
    op.drop_table('limit_events')
    op.drop_table('limit_overrides')
    op.drop_column('limits', 'thresholds')
    op.drop_column('tenants', 'on_low_budget')
