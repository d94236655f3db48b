"""pre: let a task name the reservation in whose windows it runs."""

import sqlalchemy as sa
from alembic import op

revision = "0080"
down_revision = "0079"
branch_labels = None
depends_on = None

STATES = "reservation_state in ('', 'planned', 'ended')"
OPEN = "reservation_id is not null and state not in ('done', 'failed', 'cancelled')"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("tasks", sa.Column("reservation_id", sa.Text(), nullable=True))
    op.add_column(
        "tasks", sa.Column("reservation_state", sa.Text(), server_default="", nullable=False)
    )
    op.create_check_constraint(op.f("ck_tasks_reservation_state"), "tasks", STATES)
    columns = ["reservation_id", "reservation_state", "id"]
    op.create_index("ix_tasks_reservation_id", "tasks", columns, postgresql_where=sa.text(OPEN))


def downgrade() -> None:
    op.drop_index("ix_tasks_reservation_id", "tasks")
    op.drop_constraint(op.f("ck_tasks_reservation_state"), "tasks", type_="check")
    op.drop_column("tasks", "reservation_state")
    op.drop_column("tasks", "reservation_id")
