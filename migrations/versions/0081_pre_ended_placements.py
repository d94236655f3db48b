"""pre: find the placements that ended in a time, by device."""

import sqlalchemy as sa
from alembic import op

revision = "0081"
down_revision = "0080"
branch_labels = None
depends_on = None

ENDED = sa.text("ended_at is not null")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    columns = ["device_id", "ended_at"]
    op.create_index("ix_placements_ended", "placements", columns, postgresql_where=ENDED)


def downgrade() -> None:
    op.drop_index("ix_placements_ended", "placements")
