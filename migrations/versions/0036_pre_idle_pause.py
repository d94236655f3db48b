"""pre: set after how long without computing a task of the tenant is paused."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    op.add_column("tenants", sa.Column("idle_pause_s", sa.Integer(), nullable=True))
    op.create_check_constraint(op.f("ck_tenants_idle_pause_s"), "tenants", "idle_pause_s > 0")


def downgrade() -> None:
    op.drop_column("tenants", "idle_pause_s")
