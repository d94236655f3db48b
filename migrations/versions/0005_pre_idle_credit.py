"""pre: keep the usage assumed for tenants and users while they were away; charge by memory."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.create_table(
        "lifts",
        sa.Column("island", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), server_default="", nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("faded", sa.Numeric(1000, 0), nullable=False),
        sa.PrimaryKeyConstraint("island", "tenant_id", "user_id", "kind", name=op.f("pk_lifts")),
        sa.ForeignKeyConstraint(["island"], ["islands.name"], name=op.f("fk_lifts_island_islands")),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name=op.f("fk_lifts_tenant_id_tenants"),
            ondelete="CASCADE",
        ),
    )
    op.add_column(
        "tasks", sa.Column("cost_milli", sa.BigInteger(), server_default="0", nullable=False)
    )


def downgrade() -> None:
    op.drop_column("tasks", "cost_milli")
    op.drop_table("lifts")
