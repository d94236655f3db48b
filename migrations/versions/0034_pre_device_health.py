"""pre: keep what a device's monitor told, and what its island remembers of it."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    for name in ("health", "fitness"):
        none = sa.text("'{}'")
        op.add_column("devices", sa.Column(name, JSONB(), server_default=none, nullable=False))


def downgrade() -> None:
    for name in ("fitness", "health"):
        op.drop_column("devices", name)
