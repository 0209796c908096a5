"""Alembic environment: runs migrations on the connection that `runner` passes in. Loaded by path."""

from alembic import context

from tenants.storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    # Both databases roll DDL back, so a failed upgrade leaves no partial schema.
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
