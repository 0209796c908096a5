"""Runs migrations on the connection that `runner` hands in (Alembic loads this file by path)."""

from alembic import context

from tenants.storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    # Both databases undo DDL with the transaction, so a failed upgrade leaves nothing half-done.
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
