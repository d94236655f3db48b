"""pre: record the most resources that a task took of its host."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0048"
down_revision = "0047"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column(
        "tasks", sa.Column("peaks", JSONB(), server_default=sa.text("'{}'"), nullable=False)
    )


def downgrade() -> None:
    op.drop_column("tasks", "peaks")
