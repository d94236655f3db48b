"""pre: read a page of a tenant's queue from an index, however long the queue is."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

QUEUED = sa.text("state in ('blocked', 'waiting')")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.create_index("ix_tasks_queue", "tasks", ["tenant_id", "id"], postgresql_where=QUEUED)
    op.drop_index("ix_tasks_queued", table_name="tasks")


def downgrade() -> None:
    op.create_index("ix_tasks_queued", "tasks", ["tenant_id"], postgresql_where=QUEUED)
    op.drop_index("ix_tasks_queue", table_name="tasks")
