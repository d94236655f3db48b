"""pre: let a task be a lot, which is many tasks from one description."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0068"
down_revision = "0067"
branch_labels = None
depends_on = None

LIVE = "lot_index is not null and state not in ('done', 'failed', 'cancelled')"
FAILED = "lot_index is not null and state in ('failed', 'cancelled')"
IS_MEMBER = "lot_index is not null"
COUNTS = ("made", "again", "live", "done", "failed", "cancelled")

SUMS = ("held_us", "pauses", "lost_steps")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("tasks", sa.Column("lot_id", sa.Text(), nullable=True))
    op.create_foreign_key(op.f("fk_tasks_lot_id_tasks"), "tasks", "tasks", ["lot_id"], ["id"])
    op.add_column("tasks", sa.Column("lot_index", sa.Integer(), nullable=True))
    op.add_column("tasks", sa.Column("lot_values", JSONB(), nullable=True))
    asked = sa.Column("again_asked", sa.Boolean(), server_default=sa.false(), nullable=False)
    op.add_column("tasks", asked)
    op.drop_index("ix_tasks_request_id", "tasks")
    top = sa.text("lot_index is null")
    op.create_index("ix_tasks_request_id", "tasks", ["request_id"], postgresql_where=top)
    member, live = sa.text(IS_MEMBER), sa.text(LIVE)
    key = ["lot_id", "lot_index"]
    op.create_index("uq_tasks_lot_id", "tasks", key, unique=True, postgresql_where=member)
    op.create_index("ix_tasks_lot_live", "tasks", ["lot_id"], postgresql_where=live)
    failed = sa.text(FAILED)
    op.create_index("ix_tasks_lot_failed", "tasks", key, postgresql_where=failed)
    again = sa.text("again_asked")
    op.create_index("ix_tasks_again_asked", "tasks", ["id"], postgresql_where=again)
    op.create_table(
        "lots",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("at_once", sa.Integer(), nullable=False),
        sa.Column("failures_allowed", sa.Integer(), nullable=True),
        *(sa.Column(name, sa.Integer(), server_default="0", nullable=False) for name in COUNTS),
        *(sa.Column(name, sa.BigInteger(), server_default="0", nullable=False) for name in SUMS),
        sa.Column("again_states", JSONB(), server_default="[]", nullable=False),
        sa.Column("again_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("is_open", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.CheckConstraint(
            "live >= 0 and again >= 0 and made <= count", name=op.f("ck_lots_counts")
        ),
        sa.ForeignKeyConstraint(["id"], ["tasks.id"], name=op.f("fk_lots_id_tasks")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_lots")),
    )
    op.create_index("ix_lots_open", "lots", ["id"], postgresql_where=sa.text("is_open"))


def downgrade() -> None:
    op.drop_table("lots")
    for name in ("again_asked", "lot_failed", "lot_live", "request_id"):
        op.drop_index(f"ix_tasks_{name}", "tasks")
    op.drop_index("uq_tasks_lot_id", "tasks")
    op.create_index("ix_tasks_request_id", "tasks", ["request_id"])
    op.drop_constraint(op.f("fk_tasks_lot_id_tasks"), "tasks")
    for name in ("again_asked", "lot_values", "lot_index", "lot_id"):
        op.drop_column("tasks", name)
