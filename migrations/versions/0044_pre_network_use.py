"""pre: record what an epoch of a task used of the network on its device."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("placements", sa.Column("network", JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("placements", "network")
