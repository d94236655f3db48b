"""pre: keep what tasks of a tenant may reach over the network."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    op.add_column("tenants", sa.Column("network", JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column("tenants", "network")
