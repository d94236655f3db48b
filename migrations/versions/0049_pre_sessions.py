"""pre: add sessions that give their device back, and the times when they end."""

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.add_column("tenants", sa.Column("session_end_s", sa.Integer(), nullable=True))
    op.execute(
        "alter table tenants add constraint ck_tenants_session_end_s"
        " check (session_end_s > 0) not valid"
    )
    op.drop_constraint(op.f("ck_tasks_hold"), "tasks", type_="check")
    op.execute(
        "alter table tasks add constraint ck_tasks_hold"
        " check (hold in ('', 'user', 'admin', 'idle')) not valid"
    )


def downgrade() -> None:
    op.execute("update tasks set hold = 'user' where hold = 'idle'")
    op.drop_constraint(op.f("ck_tasks_hold"), "tasks", type_="check")
    op.execute(
        "alter table tasks add constraint ck_tasks_hold"
        " check (hold in ('', 'user', 'admin')) not valid"
    )
    op.drop_column("tenants", "session_end_s")
