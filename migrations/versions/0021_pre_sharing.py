"""pre: let several graphs take turns on one device, each with a placement of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0019"
branch_labels = None
depends_on = None

ALONE = "ended_at is null and not leaving"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    for table in ("tasks", "placements"):
        column = sa.Column("shares", sa.Boolean(), server_default="false", nullable=False)
        op.add_column(table, column)
    _hold_seats(f"{ALONE} and not shares")


def downgrade() -> None:
    _hold_seats(ALONE)
    for table in ("tasks", "placements"):
        op.drop_column(table, "shares")


def _hold_seats(where: str) -> None:
    name = "uq_placements_open_seat"
    op.drop_index(name, "placements")
    op.create_index(name, "placements", ["device_id"], unique=True, postgresql_where=sa.text(where))
