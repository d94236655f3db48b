"""pre: record why a task is on its island, and for which ends the tasks of other islands wait."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    json = postgresql.JSONB(astext_type=sa.Text())
    op.add_column("tasks", sa.Column("assigned", json, nullable=True))
    abroad = sa.Column("abroad", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    op.add_column("tasks", abroad)
    op.create_index(
        "ix_tasks_abroad",
        "tasks",
        ["txid"],
        postgresql_where=sa.text("abroad and state in ('done', 'failed', 'cancelled')"),
    )
    op.create_index(
        "ix_tasks_blocked",
        "tasks",
        ["island", "kind", "tenant_id"],
        postgresql_where=sa.text("state = 'blocked'"),
    )


def downgrade() -> None:
    op.drop_index("ix_tasks_blocked", table_name="tasks")
    op.drop_index("ix_tasks_abroad", table_name="tasks")
    op.drop_column("tasks", "abroad")
    op.drop_column("tasks", "assigned")
