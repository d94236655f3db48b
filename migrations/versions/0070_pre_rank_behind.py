"""pre: record which rank of a running gang is behind."""

import sqlalchemy as sa
from alembic import op

revision = "0070"
down_revision = "0069"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("tasks", sa.Column("behind", sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("tasks", "behind")
