"""The first schema: directory, limits, ledger, audit."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

APPEND_ONLY = ("ledger", "ledger_charges", "audit")


def upgrade() -> None:
    op.create_table('audit',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
    sa.Column('at_us', sa.BigInteger(), nullable=False),
    sa.Column('actor', sa.String(length=128), nullable=False),
    sa.Column('origin', sa.String(length=128), nullable=False),
    sa.Column('action', sa.String(length=64), nullable=False),
    sa.Column('target', sa.String(length=128), nullable=False),
    sa.Column('tenant_id', sa.String(length=40), nullable=True),
    sa.Column('before', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('after', sa.JSON(none_as_null=True), nullable=True),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_audit'))
    )
    op.create_index(op.f('ix_audit_at_us'), 'audit', ['at_us'], unique=False)
    op.create_table('directory_revision',
    sa.Column('id', sa.Integer(), autoincrement=False, nullable=False),
    sa.Column('revision', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_directory_revision'))
    )
    op.create_table('ledger',
    sa.Column('id', sa.BigInteger().with_variant(sa.Integer(), 'sqlite'), autoincrement=True, nullable=False),
    sa.Column('request_id', sa.String(length=80), nullable=False),
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('tenant_id', sa.String(length=40), nullable=False),
    sa.Column('project_id', sa.String(length=40), nullable=False),
    sa.Column('key_id', sa.String(length=40), nullable=False),
    sa.Column('gateway_id', sa.String(length=80), nullable=False),
    sa.Column('tier', sa.String(length=16), nullable=False),
    sa.Column('model', sa.String(length=256), nullable=False),
    sa.Column('input_tokens', sa.BigInteger(), nullable=False),
    sa.Column('output_tokens', sa.BigInteger(), nullable=False),
    sa.Column('cost_nanousd', sa.BigInteger(), nullable=False),
    sa.Column('requests', sa.BigInteger(), nullable=False),
    sa.Column('outcome', sa.String(length=64), nullable=False),
    sa.Column('at_us', sa.BigInteger(), nullable=False),
    sa.Column('detail', sa.JSON(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_ledger')),
    sa.UniqueConstraint('request_id', 'kind', name=op.f('uq_ledger_request_id_kind'))
    )
    op.create_index('ix_ledger_gateway_id_kind_at_us', 'ledger', ['gateway_id', 'kind', 'at_us'], unique=False)
    op.create_index('ix_ledger_tenant_id_at_us', 'ledger', ['tenant_id', 'at_us'], unique=False)
    op.create_table('ledger_charges',
    sa.Column('counter', sa.String(length=256), nullable=False),
    sa.Column('request_id', sa.String(length=80), nullable=False),
    sa.PrimaryKeyConstraint('counter', 'request_id', name=op.f('pk_ledger_charges'))
    )
    op.create_index('ix_ledger_charges_request_id', 'ledger_charges', ['request_id'], unique=False)
    op.create_table('settings',
    sa.Column('name', sa.String(length=64), nullable=False),
    sa.Column('value', sa.String(length=256), nullable=False),
    sa.PrimaryKeyConstraint('name', name=op.f('pk_settings'))
    )
    op.create_table('tenants',
    sa.Column('id', sa.String(length=40), nullable=False),
    sa.Column('name', sa.String(length=64), nullable=False),
    sa.Column('status', sa.String(length=16), nullable=False),
    sa.Column('weight', sa.Float(), nullable=False),
    sa.Column('default_tier', sa.String(length=16), nullable=False),
    sa.Column('tiers', sa.JSON(), nullable=False),
    sa.Column('models', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('created_us', sa.BigInteger(), nullable=False),
    sa.Column('revision', sa.BigInteger(), nullable=False),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_tenants')),
    sa.UniqueConstraint('name', name=op.f('uq_tenants_name'))
    )
    op.create_index(op.f('ix_tenants_revision'), 'tenants', ['revision'], unique=False)
    op.create_table('limits',
    sa.Column('id', sa.String(length=40), nullable=False),
    sa.Column('tenant_id', sa.String(length=40), nullable=False),
    sa.Column('kind', sa.String(length=16), nullable=False),
    sa.Column('subject_id', sa.String(length=40), nullable=False),
    sa.Column('meter', sa.String(length=16), nullable=False),
    sa.Column('shape', sa.String(length=16), nullable=False),
    sa.Column('tier', sa.String(length=16), nullable=False),
    sa.Column('time_zone', sa.String(length=64), nullable=False),
    sa.Column('amount', sa.BigInteger(), nullable=False),
    sa.Column('rate_milli', sa.BigInteger(), nullable=True),
    sa.Column('mode', sa.String(length=16), nullable=False),
    sa.Column('created_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['tenant_id'], ['tenants.id'], name=op.f('fk_limits_tenant_id_tenants')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_limits')),
    sa.UniqueConstraint('kind', 'subject_id', 'meter', 'shape', 'tier', name=op.f('uq_limits_kind_subject_id_meter_shape_tier'))
    )
    op.create_index(op.f('ix_limits_tenant_id'), 'limits', ['tenant_id'], unique=False)
    op.create_table('projects',
    sa.Column('id', sa.String(length=40), nullable=False),
    sa.Column('tenant_id', sa.String(length=40), nullable=False),
    sa.Column('name', sa.String(length=64), nullable=False),
    sa.Column('status', sa.String(length=16), nullable=False),
    sa.Column('created_us', sa.BigInteger(), nullable=False),
    sa.ForeignKeyConstraint(['tenant_id'], ['tenants.id'], name=op.f('fk_projects_tenant_id_tenants')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_projects')),
    sa.UniqueConstraint('tenant_id', 'name', name=op.f('uq_projects_tenant_id_name'))
    )
    op.create_table('api_keys',
    sa.Column('id', sa.String(length=40), nullable=False),
    sa.Column('tenant_id', sa.String(length=40), nullable=False),
    sa.Column('project_id', sa.String(length=40), nullable=False),
    sa.Column('name', sa.String(length=64), nullable=False),
    sa.Column('scopes', sa.JSON(), nullable=False),
    sa.Column('models', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('tiers', sa.JSON(none_as_null=True), nullable=True),
    sa.Column('default_tier', sa.String(length=16), nullable=True),
    sa.Column('created_us', sa.BigInteger(), nullable=False),
    sa.Column('expires_us', sa.BigInteger(), nullable=True),
    sa.Column('revoked_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_api_keys_project_id_projects')),
    sa.ForeignKeyConstraint(['tenant_id'], ['tenants.id'], name=op.f('fk_api_keys_tenant_id_tenants')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_api_keys'))
    )
    op.create_index(op.f('ix_api_keys_tenant_id'), 'api_keys', ['tenant_id'], unique=False)
    op.create_table('key_secrets',
    sa.Column('public_id', sa.String(length=24), nullable=False),
    sa.Column('key_id', sa.String(length=40), nullable=False),
    sa.Column('digest', sa.LargeBinary(length=32), nullable=False),
    sa.Column('created_us', sa.BigInteger(), nullable=False),
    sa.Column('expires_us', sa.BigInteger(), nullable=True),
    sa.ForeignKeyConstraint(['key_id'], ['api_keys.id'], name=op.f('fk_key_secrets_key_id_api_keys')),
    sa.PrimaryKeyConstraint('public_id', name=op.f('pk_key_secrets'))
    )
    op.create_index(op.f('ix_key_secrets_key_id'), 'key_secrets', ['key_id'], unique=False)

    op.execute("INSERT INTO directory_revision (id, revision) VALUES (1, 0)")
    _refuse_changes()


def _refuse_changes() -> None:
    """Triggers: what is written in these tables stays."""
    if op.get_bind().dialect.name == "sqlite":
        for table in APPEND_ONLY:
            for change in ("update", "delete"):
                op.execute(
                    f"CREATE TRIGGER {table}_no_{change} BEFORE {change.upper()} ON {table} "
                    f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
                )
        return
    op.execute(
        "CREATE FUNCTION fairgate_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION fairgate_append_only()"
        )


def downgrade() -> None:
    op.drop_index(op.f('ix_key_secrets_key_id'), table_name='key_secrets')
    op.drop_table('key_secrets')
    op.drop_index(op.f('ix_api_keys_tenant_id'), table_name='api_keys')
    op.drop_table('api_keys')
    op.drop_table('projects')
    op.drop_index(op.f('ix_limits_tenant_id'), table_name='limits')
    op.drop_table('limits')
    op.drop_index(op.f('ix_tenants_revision'), table_name='tenants')
    op.drop_table('tenants')
    op.drop_table('settings')
    op.drop_index('ix_ledger_charges_request_id', table_name='ledger_charges')
    op.drop_table('ledger_charges')
    op.drop_index('ix_ledger_tenant_id_at_us', table_name='ledger')
    op.drop_index('ix_ledger_gateway_id_kind_at_us', table_name='ledger')
    op.drop_table('ledger')
    op.drop_table('directory_revision')
    op.drop_index(op.f('ix_audit_at_us'), table_name='audit')
    op.drop_table('audit')

    # SQLite drops triggers with their table.
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION fairgate_append_only()")
