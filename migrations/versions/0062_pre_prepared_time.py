"""pre: record how long a task held its device before it started."""

from alembic import op
from sqlalchemy import BigInteger, Column

revision = "0062"
down_revision = "0061"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.add_column("tasks", Column("prepared_us", BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.drop_column("tasks", "prepared_us")
