"""pre: record how long a job stood still in its slot while its state was copied."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    staged = sa.Column("staged_us", sa.BigInteger(), server_default="0", nullable=False)
    op.add_column("placements", staged)


def downgrade() -> None:
    op.drop_column("placements", "staged_us")
