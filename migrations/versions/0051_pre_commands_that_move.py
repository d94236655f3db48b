"""pre: record why a command cannot leave its device, and where its processes can go on."""

import sqlalchemy as sa
from alembic import op

revision = "0051"
down_revision = "0050"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for name in ("bound_because", "goes_on_with"):
        op.add_column("tasks", sa.Column(name, sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    for name in ("goes_on_with", "bound_because"):
        op.drop_column("tasks", name)
