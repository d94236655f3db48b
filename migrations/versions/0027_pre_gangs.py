"""pre: keep gangs that span islands, and their tickets there."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

OF_GANGS = sa.text("gang_id is not null")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    op.add_column("tasks", sa.Column("gang_id", sa.Text(), nullable=True))
    good_for = sa.Column("good_for", sa.Integer(), server_default="0", nullable=False)
    op.add_column("tasks", good_for)
    op.create_foreign_key("fk_tasks_gang_id_tasks", "tasks", "tasks", ["gang_id"], ["id"])
    op.create_index("ix_tasks_gang_id", "tasks", ["gang_id"], postgresql_where=OF_GANGS)
    op.create_index("ix_tasks_gang_txid", "tasks", ["txid"], postgresql_where=OF_GANGS)
    failed = sa.text("gang_id is not null and retry_at is not null")
    op.create_index("ix_tasks_gang_retry", "tasks", ["retry_at"], postgresql_where=failed)


def downgrade() -> None:
    op.drop_index("ix_tasks_gang_retry", table_name="tasks")
    op.drop_index("ix_tasks_gang_txid", table_name="tasks")
    op.drop_index("ix_tasks_gang_id", table_name="tasks")
    op.drop_constraint("fk_tasks_gang_id_tasks", "tasks")
    op.drop_column("tasks", "good_for")
    op.drop_column("tasks", "gang_id")
