"""pre: keep the times of the nodes of a graph that ran, for its next plans."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    column = sa.Column("took_ms", postgresql.JSONB(), server_default="{}", nullable=False)
    op.add_column("graphs", column)


def downgrade() -> None:
    op.drop_column("graphs", "took_ms")
