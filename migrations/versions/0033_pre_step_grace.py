"""pre: record for how long a step may go on after its device's lease."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    none = sa.Column("grace_us", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("devices", none)


def downgrade() -> None:
    op.drop_column("devices", "grace_us")
