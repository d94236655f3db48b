"""pre: record how long tasks held devices beside their home, in all."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    column = sa.Column("guest_held_us", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("tasks", column)


def downgrade() -> None:
    op.drop_column("tasks", "guest_held_us")
