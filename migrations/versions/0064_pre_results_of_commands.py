"""pre: say which files of a command were not kept, and why the store refuses what a task stores."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import text
from sqlalchemy.dialects.postgresql import JSONB

revision = "0064"
down_revision = "0063"
branch_labels = None
depends_on = None

INDEX = "ix_tasks_unstored"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for column in (
        sa.Column("dropped", JSONB(), server_default="{}", nullable=False),
        sa.Column("unstored", sa.Text(), server_default="", nullable=False),
    ):
        op.add_column("tasks", column, if_not_exists=True)  # tried again after the index failed
    with op.get_context().autocommit_block():  # the table may be large, and is written meanwhile
        op.drop_index(INDEX, "tasks", if_exists=True, postgresql_concurrently=True)  # a broken one
        op.create_index(
            INDEX,
            "tasks",
            ["id"],
            postgresql_where=text("unstored != ''"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    op.drop_index(INDEX, "tasks")
    for column in ("unstored", "dropped"):
        op.drop_column("tasks", column)
