"""pre: record what tasks held while their devices were not heard."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    none = sa.Column("unheard_us", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("tasks", none)


def downgrade() -> None:
    op.drop_column("tasks", "unheard_us")
