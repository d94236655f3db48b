"""pre: let tasks avoid devices on which they failed, and let a rule of retry hold them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0066"
down_revision = "0065"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("tasks", sa.Column("avoids", JSONB(), server_default="[]", nullable=False))
    op.drop_constraint(op.f("ck_tasks_hold"), "tasks", type_="check")
    op.execute(
        "alter table tasks add constraint ck_tasks_hold"
        " check (hold in ('', 'user', 'admin', 'idle', 'rule')) not valid"
    )


def downgrade() -> None:
    op.execute("update tasks set hold = 'user' where hold = 'rule'")
    op.drop_constraint(op.f("ck_tasks_hold"), "tasks", type_="check")
    op.execute(
        "alter table tasks add constraint ck_tasks_hold"
        " check (hold in ('', 'user', 'admin', 'idle')) not valid"
    )
    op.drop_column("tasks", "avoids")
