"""pre: keep the usage that a changed weight carries over, so that the weight counts from now on."""

import sqlalchemy as sa
from alembic import op

revision = "0054"
down_revision = "0053"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for table in ("tenants", "users"):
        op.add_column(
            table, sa.Column("carried", sa.Numeric(1000, 0), server_default="0", nullable=False)
        )


def downgrade() -> None:
    for table in ("users", "tenants"):
        op.drop_column(table, "carried")
