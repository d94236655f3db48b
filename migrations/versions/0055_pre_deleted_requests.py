"""pre: delete ended requests when asked or after a time, except those that are kept."""

import sqlalchemy as sa
from alembic import op

revision = "0055"
down_revision = "0054"
branch_labels = None
depends_on = None

#: What outlives the request or task that it names.
OUTLIVE = {
    "fk_datablocks_task_id_tasks": ("datablocks", "tasks", "task_id"),
    "fk_deliveries_request_id_requests": ("deliveries", "requests", "request_id"),
}


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    keep = sa.Column("keep", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    op.add_column("requests", keep)
    asked = sa.Column("delete_asked_at", sa.DateTime(timezone=True), nullable=True)
    op.add_column("requests", asked)
    op.create_index(
        "ix_requests_ended_at",
        "requests",
        ["ended_at"],
        postgresql_where=sa.text("ended_at is not null and not keep"),
    )
    op.create_index(
        "ix_requests_delete_asked_at",
        "requests",
        ["delete_asked_at"],
        postgresql_where=sa.text("delete_asked_at is not null"),
    )
    # Without an index, each deleted task would search all events; with one, each event costs more.
    op.drop_constraint("fk_events_task_id_tasks", "events", type_="foreignkey")
    op.create_index("ix_decisions_task_id", "decisions", ["task_id"])
    for name, (table, of, column) in OUTLIVE.items():
        op.drop_constraint(name, table, type_="foreignkey")
        op.create_foreign_key(name, table, of, [column], ["id"], ondelete="SET NULL")
    op.create_index(
        "ix_usage_fine",
        "usage",
        ["bucket"],
        postgresql_where=sa.text("bucket_s < 3600"),
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")

    op.drop_index("ix_usage_fine", "usage")
    for name, (table, of, column) in OUTLIVE.items():
        op.drop_constraint(name, table, type_="foreignkey")
        op.create_foreign_key(name, table, of, [column], ["id"])
    op.drop_index("ix_decisions_task_id", "decisions")
    op.execute("update events set task_id = null where task_id not in (select id from tasks)")
    op.create_foreign_key("fk_events_task_id_tasks", "events", "tasks", ["task_id"], ["id"])
    op.drop_index("ix_requests_delete_asked_at", "requests")
    op.drop_index("ix_requests_ended_at", "requests")
    for name in ("delete_asked_at", "keep"):
        op.drop_column("requests", name)
