"""pre: rank checkpoints by a metric, and mark the best of each task."""

import sqlalchemy as sa
from alembic import op

revision = "0074"
down_revision = "0073"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("checkpoints", sa.Column("ranked_value", sa.Float(), nullable=True))
    op.add_column("checkpoints", sa.Column("ranked_step", sa.BigInteger(), nullable=True))
    best = sa.Column("best", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    op.add_column("checkpoints", best)
    where = sa.text("best")
    op.create_index(
        "ix_checkpoints_best", "checkpoints", ["tenant_id", "task_id"], postgresql_where=where
    )


def downgrade() -> None:
    op.drop_index("ix_checkpoints_best", "checkpoints")
    for name in ("best", "ranked_step", "ranked_value"):
        op.drop_column("checkpoints", name)
