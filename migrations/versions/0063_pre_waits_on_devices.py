"""pre: say what a launched task waits for on its device, for the reasons why it waits."""

import sqlalchemy as sa
from alembic import op

revision = "0063"
down_revision = "0062"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    column = sa.Column("waits_for", sa.Text(), server_default="", nullable=False)
    op.add_column("placements", column)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")
    op.drop_column("placements", "waits_for")
