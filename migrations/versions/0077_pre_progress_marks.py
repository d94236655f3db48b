"""pre: keep the newest progress that control saw, so that channels are told of tasks that stall."""

import sqlalchemy as sa
from alembic import op

revision = "0077"
down_revision = "0076"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "progress_marks",
        sa.Column("task_id", sa.Text(), nullable=False),
        *(_count(name) for name in ("step", "line", "row", "held_us")),
        sa.Column("is_told", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_progress_marks")),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name=op.f("fk_progress_marks_task_id_tasks")
        ),
    )


def downgrade() -> None:
    op.drop_table("progress_marks")


def _count(name: str) -> sa.Column:
    return sa.Column(name, sa.BigInteger(), nullable=False)
