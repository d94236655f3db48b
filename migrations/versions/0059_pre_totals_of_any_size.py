"""pre: totals of users that may exceed 64 bits: 10,000 devices of cost 10 reach them in 3 years."""

import sqlalchemy as sa
from alembic import op

revision = "0059"
down_revision = "0058"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.alter_column("accounts", "total_us", type_=sa.Numeric(1000, 0))


def downgrade() -> None:
    op.alter_column("accounts", "total_us", type_=sa.BigInteger())
