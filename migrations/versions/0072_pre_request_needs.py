"""pre: let tasks come after other requests."""

import sqlalchemy as sa
from alembic import op

revision = "0072"
down_revision = "0071"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    standing = sa.Column("standing", sa.Text(), server_default="", nullable=False)
    op.add_column("tasks", standing)
    op.execute(
        "alter table tasks add constraint ck_tasks_standing"
        " check (standing in ('', 'waits', 'held', 'never')) not valid"
    )
    op.create_table(
        "request_needs",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("needs_request_id", sa.Text(), nullable=False),
        sa.Column("needs_task_id", sa.Text(), server_default="", nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("awaited", sa.Text(), nullable=False),
        sa.Column("otherwise", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), server_default="", nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "awaited in ('done', 'ended', 'failed', 'started')",
            name=op.f("ck_request_needs_awaited"),
        ),
        sa.CheckConstraint(
            "otherwise in ('fail', 'hold', 'run')", name=op.f("ck_request_needs_otherwise")
        ),
        sa.CheckConstraint(
            "outcome in ('', 'met', 'fail', 'hold', 'run', 'waived')",
            name=op.f("ck_request_needs_outcome"),
        ),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name=op.f("fk_request_needs_task_id_tasks")
        ),
        sa.PrimaryKeyConstraint(
            "task_id", "needs_request_id", "needs_task_id", name=op.f("pk_request_needs")
        ),
    )
    op.create_index("ix_request_needs_needs_request_id", "request_needs", ["needs_request_id"])
    open_ = sa.text("outcome in ('', 'hold')")
    op.create_index(
        "ix_request_needs_open", "request_needs", ["needs_request_id"], postgresql_where=open_
    )


def downgrade() -> None:
    op.drop_table("request_needs")
    op.drop_constraint(op.f("ck_tasks_standing"), "tasks")
    op.drop_column("tasks", "standing")
