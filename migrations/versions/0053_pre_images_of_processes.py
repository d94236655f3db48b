"""pre: record how much a command had printed when its processes were dumped."""

import sqlalchemy as sa
from alembic import op

revision = "0053"
down_revision = "0052"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for name in ("printed_epoch", "printed_lines"):
        op.add_column("checkpoints", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    for name in ("printed_lines", "printed_epoch"):
        op.drop_column("checkpoints", name)
