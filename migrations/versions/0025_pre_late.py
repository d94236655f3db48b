"""pre: record which inputs of partitions may come while they run."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    late = sa.Column("late", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    op.add_column("needs", late)


def downgrade() -> None:
    op.drop_column("needs", "late")
