"""pre: record which host wrote a checkpoint, which key signs it, and what it added to the store."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    text = {"server_default": "", "nullable": False}
    op.add_column("checkpoints", sa.Column("host", sa.Text(), **text))
    op.add_column("checkpoints", sa.Column("key", sa.Text(), **text))
    op.add_column(
        "checkpoints", sa.Column("new_bytes", sa.BigInteger(), server_default="0", nullable=False)
    )


def downgrade() -> None:
    for column in ("new_bytes", "key", "host"):
        op.drop_column("checkpoints", column)
