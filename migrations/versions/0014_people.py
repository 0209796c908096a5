"""People who may log in to the console, their sessions, and links to set a password."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

ID = sa.String(40)
WORD = sa.String(16)


def upgrade() -> None:
    op.create_table(
        "people",
        sa.Column("id", ID, primary_key=True),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("role", WORD, nullable=False),
        sa.Column("tenants", sa.JSON, nullable=False),
        sa.Column("status", WORD, nullable=False),
        sa.Column("password_hash", sa.String(200), nullable=False),
        sa.Column("password_us", sa.BigInteger),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "person_links",
        sa.Column("digest", sa.LargeBinary(32), primary_key=True),
        sa.Column("person_id", ID, sa.ForeignKey("people.id"), index=True),
        sa.Column("expires_us", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "person_sessions",
        sa.Column("digest", sa.LargeBinary(32), primary_key=True),
        sa.Column("id", ID, nullable=False, unique=True),
        sa.Column("person_id", ID, sa.ForeignKey("people.id"), nullable=False, index=True),
        sa.Column("person_revision", sa.BigInteger, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
        sa.Column("ends_us", sa.BigInteger, nullable=False, index=True),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("user_agent", sa.String(200), nullable=False),
    )


def downgrade() -> None:
    for name in ("person_sessions", "person_links", "people"):
        op.drop_table(name)
