"""pre: allow mounts that are container images."""

import sqlalchemy as sa
from alembic import op

revision = "0050"
down_revision = "0049"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("mounts", sa.Column("sort", sa.Text(), server_default="folder", nullable=False))


def downgrade() -> None:
    op.drop_column("mounts", "sort")
