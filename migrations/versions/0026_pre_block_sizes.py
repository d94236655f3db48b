"""pre: keep the sizes of the blocks of a graph that ran, for its next plans."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    column = sa.Column("made_bytes", postgresql.JSONB(), server_default="{}", nullable=False)
    op.add_column("graphs", column)


def downgrade() -> None:
    op.drop_column("graphs", "made_bytes")
