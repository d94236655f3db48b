"""pre: let reservations take devices by their ids or labels, and say which they keep now."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0082"
down_revision = "0081"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the service
    labels = sa.Column("labels", JSONB, server_default=sa.text("'[]'"), nullable=False)
    op.add_column("reservations", labels)
    op.add_column("devices", sa.Column("reserved_by", sa.Text, server_default="", nullable=False))
    op.execute(
        "create trigger touch_reserved before update of reserved_by on devices"
        " for each row execute function touch()"
    )


def downgrade() -> None:
    op.execute("drop trigger touch_reserved on devices")
    op.drop_column("devices", "reserved_by")
    op.drop_column("reservations", "labels")
