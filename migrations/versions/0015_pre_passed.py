"""pre: record how many bytes passed between the executors of a graph."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    op.add_column("tasks", sa.Column("passed", postgresql.JSONB(), nullable=True))


def downgrade() -> None:
    op.drop_column("tasks", "passed")
