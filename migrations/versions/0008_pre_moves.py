"""pre: record to which device a task is asked to move, since when, and how far the move is."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("tasks", sa.Column("move_to", sa.Text(), nullable=True))
    op.add_column("tasks", sa.Column("move_asked_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("tasks", sa.Column("moving", postgresql.JSONB(), nullable=True))
    op.create_index(
        "ix_tasks_move_to", "tasks", ["move_to"], postgresql_where=sa.text("move_to is not null")
    )


def downgrade() -> None:
    op.drop_index("ix_tasks_move_to", table_name="tasks")
    for column in ("moving", "move_asked_at", "move_to"):
        op.drop_column("tasks", column)
