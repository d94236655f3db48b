"""pre: record which outputs of partitions are durable before their partition has ended."""

import sqlalchemy as sa
from alembic import op

from app.db.models import Xid8

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("needs", sa.Column("given", Xid8(), nullable=True))
    is_given = sa.text("given is not null")
    op.create_index("ix_needs_given", "needs", ["given"], postgresql_where=is_given)


def downgrade() -> None:
    op.drop_index("ix_needs_given", table_name="needs")
    op.drop_column("needs", "given")
