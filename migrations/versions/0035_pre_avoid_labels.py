"""pre: give tasks that avoid devices with a label lines of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

NEED = ["island", "user_id", "kind", "memory_bytes"]
ORDER = [sa.text("priority desc"), "submitted_at", "id"]


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    for table in ("tasks", "lines"):
        column = sa.Column("avoid_labels", sa.Text(), server_default="", nullable=False)
        op.add_column(table, column)
    _set_key("avoid_labels")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")

    op.execute("create temporary table apart on commit drop as select * from lines")
    op.execute("delete from lines")
    op.execute(
        "insert into lines (island, user_id, kind, memory_bytes, width, tenant_id, waiting)"
        " select island, user_id, kind, memory_bytes, width, min(tenant_id), sum(waiting)"
        " from apart group by island, user_id, kind, memory_bytes, width"
    )
    _set_key()
    for table in ("lines", "tasks"):
        op.drop_column(table, "avoid_labels")


def _set_key(*more: str) -> None:
    """Make the key of a line, and the index that finds the tasks of a line in their order."""
    op.drop_constraint("pk_lines", "lines", type_="primary")
    op.create_primary_key("pk_lines", "lines", [*NEED, "width", *more])
    op.drop_index("ix_tasks_line", "tasks")
    waiting = sa.text("state = 'waiting'")
    columns = [*NEED, "devices_min", *more, *ORDER]
    op.create_index("ix_tasks_line", "tasks", columns, postgresql_where=waiting)
