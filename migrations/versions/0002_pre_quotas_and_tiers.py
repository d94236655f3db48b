"""pre: add the guarantees and limits of tenants, the weights of users and the tiers of tasks."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

A_TIER = "tier in ('premium', 'standard', 'basic')"
QUEUED = sa.text("state in ('blocked', 'waiting')")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    for name in ("guarantee", "limit"):
        devices = postgresql.JSONB(astext_type=sa.Text())
        op.add_column(
            "tenants", sa.Column(name, devices, server_default=sa.text("'{}'"), nullable=False)
        )
    for name in ("max_running", "max_queued"):
        op.add_column("tenants", sa.Column(name, sa.Integer(), nullable=True))
        op.create_check_constraint(op.f(f"ck_tenants_{name}"), "tenants", f"{name} >= 0")
    op.add_column(
        "tenants", sa.Column("tier", sa.Text(), server_default="standard", nullable=False)
    )
    op.execute("update tenants set tier = 'premium' where parent_id is null")
    op.create_check_constraint(op.f("ck_tenants_tier"), "tenants", A_TIER)
    op.create_index("ix_tenants_parent_id", "tenants", ["parent_id"])

    op.add_column(
        "users", sa.Column("weight_milli", sa.BigInteger(), server_default="1000", nullable=False)
    )
    op.create_check_constraint(op.f("ck_users_weight_milli"), "users", "weight_milli > 0")
    op.add_column("users", sa.Column("version", sa.Integer(), server_default="1", nullable=False))

    for name in ("devices_min", "devices_max"):
        op.add_column("tasks", sa.Column(name, sa.Integer(), server_default="1", nullable=False))
    op.create_check_constraint(
        op.f("ck_tasks_devices"), "tasks", "devices_min between 1 and devices_max"
    )
    op.add_column("tasks", sa.Column("tier", sa.Text(), server_default="standard", nullable=False))
    op.execute(
        "update tasks set tier = requests.tier from requests"
        " where requests.id = tasks.request_id and requests.tier <> 'standard'"
    )
    op.create_check_constraint(op.f("ck_tasks_tier"), "tasks", A_TIER)
    op.create_index("ix_tasks_queued", "tasks", ["tenant_id"], postgresql_where=QUEUED)


def downgrade() -> None:
    op.drop_index("ix_tasks_queued", table_name="tasks")
    for name in ("tier", "devices_max", "devices_min"):
        op.drop_column("tasks", name)
    for name in ("version", "weight_milli"):
        op.drop_column("users", name)
    op.drop_index("ix_tenants_parent_id", table_name="tenants")
    for name in ("tier", "max_queued", "max_running", "limit", "guarantee"):
        op.drop_column("tenants", name)
