"""pre: let checkpoints be pinned."""

import sqlalchemy as sa
from alembic import op

revision = "0073"
down_revision = "0072"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    pinned_at = sa.Column("pinned_at", sa.DateTime(timezone=True), nullable=True)
    op.add_column("checkpoints", pinned_at)
    where = sa.text("pinned_at is not null")
    columns = ["tenant_id", "task_id"]
    op.create_index("ix_checkpoints_pinned", "checkpoints", columns, postgresql_where=where)


def downgrade() -> None:
    op.drop_index("ix_checkpoints_pinned", "checkpoints")
    op.drop_column("checkpoints", "pinned_at")
