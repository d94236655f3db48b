"""pre: let members of a lot pause at rungs, by the values that they reached there."""

import sqlalchemy as sa
from alembic import op

revision = "0071"
down_revision = "0070"
branch_labels = None
depends_on = None

HOLDS = ("", "user", "admin", "idle", "rule")
RESTING = (
    "hold in ('rung', 'promoted') and state in ('blocked', 'waiting') and cancel_asked_at is null"
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    _bound_holds((*HOLDS, "rung", "promoted"))
    resting = sa.text(RESTING)
    op.create_index("ix_tasks_resting", "tasks", ["lot_id", "hold"], postgresql_where=resting)
    stopped = sa.Column("stopped", sa.Integer(), server_default="0", nullable=False)
    op.add_column("lots", stopped)
    now = sa.text("clock_timestamp()")
    op.create_table(
        "rung_results",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("rung", sa.Integer(), nullable=False),
        sa.Column("lot_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), server_default=now, nullable=False),
        sa.Column("passed", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("is_decided", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(
            ["lot_id"], ["tasks.id"], name=op.f("fk_rung_results_lot_id_tasks")
        ),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name=op.f("fk_rung_results_task_id_tasks")
        ),
        sa.PrimaryKeyConstraint("task_id", "rung", name=op.f("pk_rung_results")),
    )
    op.create_index("ix_rung_results_lot_id", "rung_results", ["lot_id"])
    new = sa.text("not is_decided")
    op.create_index("ix_rung_results_new", "rung_results", ["lot_id"], postgresql_where=new)


def downgrade() -> None:
    op.drop_table("rung_results")
    op.drop_column("lots", "stopped")
    op.drop_index("ix_tasks_resting", "tasks")
    op.execute("update tasks set hold = 'user' where hold in ('rung', 'promoted')")
    _bound_holds(HOLDS)


def _bound_holds(words: tuple[str, ...]) -> None:
    op.drop_constraint(op.f("ck_tasks_hold"), "tasks")
    listed = ", ".join(f"'{word}'" for word in words)
    op.create_check_constraint(op.f("ck_tasks_hold"), "tasks", f"hold in ({listed})")
