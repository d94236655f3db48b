"""pre: allow tasks on devices of several hosts, each of which gets orders."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

BEFORE = ["task_id", "epoch", "seq"]
AFTER = [*BEFORE, "device_id"]


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    column = sa.Column("across_hosts", sa.Boolean(), server_default="false", nullable=False)
    op.add_column("tasks", column)
    _replace(BEFORE, AFTER)


def downgrade() -> None:
    _replace(AFTER, BEFORE)
    op.drop_column("tasks", "across_hosts")


def _replace(before: list[str], after: list[str]) -> None:
    op.drop_constraint(f"uq_orders_{'_'.join(before)}", "orders", type_="unique")
    op.create_unique_constraint(f"uq_orders_{'_'.join(after)}", "orders", after)
