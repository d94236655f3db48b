"""pre: indexes for lists of requests, and for the tasks that have an output."""

import sqlalchemy as sa
from alembic import op

revision = "0056"
down_revision = "0055"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    # A million requests are read in some seconds; submits wait for so long.
    op.create_index(
        "ix_requests_live",
        "requests",
        ["id"],
        postgresql_where=sa.text("state not in ('done', 'failed', 'cancelled')"),
    )
    op.create_index("ix_requests_name", "requests", ["name", "id"])
    op.create_index("ix_requests_id_ends", "requests", [sa.text("right(id, 8)")])
    op.create_index(
        "ix_requests_labels",
        "requests",
        ["labels"],
        postgresql_using="gin",
        postgresql_ops={"labels": "jsonb_path_ops"},
    )
    # Requests lie in the order of this time, so a few pages of index are enough for a year.
    op.create_index(
        "ix_requests_submitted_at", "requests", ["submitted_at"], postgresql_using="brin"
    )
    op.create_index(
        "ix_tasks_outputs",
        "tasks",
        [sa.text("jsonb_path_query_array(outputs, '$.*.sha256')")],
        postgresql_using="gin",
        postgresql_where=sa.text("outputs <> '{}'"),
    )


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")

    op.drop_index("ix_tasks_outputs", "tasks")
    for name in ("submitted_at", "labels", "id_ends", "name", "live"):
        op.drop_index(f"ix_requests_{name}", "requests")
