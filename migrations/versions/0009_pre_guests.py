"""pre: record the devices that an elastic task holds beyond its home, and since when."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

HOME = sa.text("not guest")
OPEN_HOME = sa.text("ended_at is null and not guest")
OPEN_GUEST = sa.text("ended_at is null and guest")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("tasks", sa.Column("resized_at", sa.DateTime(timezone=True), nullable=True))
    column = sa.Column("guest", sa.Boolean(), nullable=False, server_default=sa.text("false"))
    op.add_column("placements", column)
    op.drop_constraint("uq_placements_task_id_epoch", "placements", type_="unique")
    op.drop_index("uq_placements_open_task", table_name="placements")
    _index("uq_placements_home", ["task_id", "epoch"], HOME)
    _index("uq_placements_open_task", ["task_id"], OPEN_HOME)
    _index("uq_placements_open_guest", ["task_id", "device_id"], OPEN_GUEST)


def downgrade() -> None:
    for name in ("uq_placements_open_guest", "uq_placements_open_task", "uq_placements_home"):
        op.drop_index(name, table_name="placements")
    op.execute("delete from placements where guest")  # what they were charged stays in the ledger
    _index("uq_placements_open_task", ["task_id"], sa.text("ended_at is null"))
    columns = ["task_id", "epoch"]
    op.create_unique_constraint("uq_placements_task_id_epoch", "placements", columns)
    op.drop_column("placements", "guest")
    op.drop_column("tasks", "resized_at")


def _index(name: str, columns: list[str], where: sa.TextClause) -> None:
    op.create_index(name, "placements", columns, unique=True, postgresql_where=where)
