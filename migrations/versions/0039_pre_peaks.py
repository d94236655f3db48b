"""pre: record the most memory that a task's process held on a device and on its host."""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None

PEAKS = ("peak_device_bytes", "peak_host_bytes")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for name in PEAKS:
        column = sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
        op.add_column("tasks", column)


def downgrade() -> None:
    for name in PEAKS:
        op.drop_column("tasks", name)
