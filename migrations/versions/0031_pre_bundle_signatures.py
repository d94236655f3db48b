"""pre: record with which parameters the classes of a bundle can be made."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    empty = sa.text("'{}'::jsonb")
    op.add_column("bundles", sa.Column("signatures", JSONB(), server_default=empty, nullable=False))


def downgrade() -> None:
    op.drop_column("bundles", "signatures")
