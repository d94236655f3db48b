"""pre: let several tasks hold fractions of one device at once, each with a placement of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None

ALONE = "ended_at is null and not leaving and not shares"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    column = sa.Column("fraction_milli", sa.Integer(), server_default="1000", nullable=False)
    op.add_column("placements", column)
    _hold_seats(f"{ALONE} and fraction_milli = 1000")


def downgrade() -> None:
    _hold_seats(ALONE)
    op.drop_column("placements", "fraction_milli")


def _hold_seats(where: str) -> None:
    name = "uq_placements_open_seat"
    op.drop_index(name, "placements")
    op.create_index(name, "placements", ["device_id"], unique=True, postgresql_where=sa.text(where))
