"""pre: let tenants and users have budgets, and count what is charged in each period."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0075"
down_revision = "0074"
branch_labels = None
depends_on = None

OWNERS = ("tenants", "users")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for owner in OWNERS:
        op.add_column(owner, sa.Column("budget", JSONB(), nullable=True))
        exhausted = sa.Column("exhausted", JSONB(), server_default="{}", nullable=False)
        op.add_column(owner, exhausted)
        ends_at = sa.Column("budget_ends_at", sa.DateTime(timezone=True), nullable=True)
        op.add_column(owner, ends_at)
    # each round asks whether there is any budget
    where = sa.text("budget is not null")
    op.create_index("ix_users_budget", "users", ["id"], postgresql_where=where)
    op.create_table(
        "budget_periods",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), server_default="", nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("begins_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("granted_us", sa.BigInteger(), nullable=False),
        sa.Column("carried_us", sa.BigInteger(), nullable=True),
        sa.Column("adjustments", JSONB(), server_default="[]", nullable=False),
        sa.Column("spent_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("told", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant_id", "user_id", "kind", "begins_at", name="pk_budget_periods"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name="fk_budget_periods_tenant_id_tenants",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    op.drop_table("budget_periods")
    op.drop_index("ix_users_budget", "users")
    for owner in OWNERS:
        for name in ("budget_ends_at", "exhausted", "budget"):
            op.drop_column(owner, name)
