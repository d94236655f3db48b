"""pre: record how each input of a launch came: it was there, or a host or the store gave it."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    column = sa.Column("ways", postgresql.JSONB(), server_default="{}", nullable=False)
    op.add_column("placements", column)


def downgrade() -> None:
    op.drop_column("placements", "ways")
