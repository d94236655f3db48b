"""pre: give tasks that choose their devices by traits lines of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None

NEED = ["island", "user_id", "kind", "memory_bytes"]
ORDER = [sa.text("priority desc"), "submitted_at", "id"]


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    for table in ("tasks", "lines"):
        column = sa.Column("device_choice", sa.Text(), server_default="", nullable=False)
        op.add_column(table, column)
        op.execute(
            f"update {table} set device_choice = '-' || replace(avoid_labels, ',', ',-')"
            " where avoid_labels <> ''"
        )
    _set_key("device_choice")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")

    # Lines of tasks that avoid the same labels, and differ otherwise, become one line again.
    op.execute("create temporary table apart on commit drop as select * from lines")
    op.execute("delete from lines")
    op.execute(
        "insert into lines (island, user_id, kind, memory_bytes, width, avoid_labels, tenant_id,"
        " waiting) select island, user_id, kind, memory_bytes, width, avoid_labels,"
        " min(tenant_id), sum(waiting) from apart"
        " group by island, user_id, kind, memory_bytes, width, avoid_labels"
    )
    _set_key("avoid_labels")
    for table in ("lines", "tasks"):
        op.drop_column(table, "device_choice")


def _set_key(choice: str) -> None:
    """Make the key of a line, and the index that finds the tasks of a line in their order."""
    op.drop_constraint("pk_lines", "lines", type_="primary")
    op.create_primary_key("pk_lines", "lines", [*NEED, "width", choice])
    op.drop_index("ix_tasks_line", "tasks")
    waiting = sa.text("state = 'waiting'")
    columns = [*NEED, "devices_min", choice, *ORDER]
    op.create_index("ix_tasks_line", "tasks", columns, postgresql_where=waiting)
