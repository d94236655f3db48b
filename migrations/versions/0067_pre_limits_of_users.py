"""pre: let a user have limits, and a tenant the limits of its users."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0067"
down_revision = "0066"
branch_labels = None
depends_on = None

COUNTS = ("max_running", "max_queued", "max_sessions")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    defaults = sa.Column("user_defaults", JSONB(), server_default="{}", nullable=False)
    op.add_column("tenants", defaults)
    op.add_column("users", sa.Column("limit", JSONB(), nullable=True))
    for name in COUNTS:
        op.add_column("users", sa.Column(name, sa.Integer(), nullable=True))
        op.create_check_constraint(op.f(f"ck_users_{name}"), "users", f"{name} >= 0")
    op.add_column("users", sa.Column("max_duration_s", sa.Float(), nullable=True))
    op.create_check_constraint(op.f("ck_users_max_duration_s"), "users", "max_duration_s > 0")


def downgrade() -> None:
    for name in ("max_duration_s", *COUNTS, "limit"):
        op.drop_column("users", name)
    op.drop_column("tenants", "user_defaults")
