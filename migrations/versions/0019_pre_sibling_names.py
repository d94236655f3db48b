"""pre: make names of tenants unique among siblings; find running tasks among many waiting ones."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

OPEN = sa.text("ended_at is null")
ON_A_DEVICE = sa.text("state in ('starting', 'running', 'splicing', 'pausing', 'stopping')")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.create_index(
        "uq_tenants_parent_id_name",
        "tenants",
        ["parent_id", "name"],
        unique=True,
        postgresql_nulls_not_distinct=True,
    )
    op.drop_constraint("uq_tenants_name", "tenants")
    op.drop_index("ix_tenants_parent_id", table_name="tenants")
    op.create_index("ix_tasks_on_a_device", "tasks", ["seat"], postgresql_where=ON_A_DEVICE)
    op.create_index("ix_placements_open", "placements", ["device_id"], postgresql_where=OPEN)
    op.create_index("ix_placements_task_id", "placements", ["task_id"])


def downgrade() -> None:
    op.drop_index("ix_placements_task_id", table_name="placements")
    op.drop_index("ix_placements_open", table_name="placements")
    op.drop_index("ix_tasks_on_a_device", table_name="tasks")
    op.create_index("ix_tenants_parent_id", "tenants", ["parent_id"])
    op.create_unique_constraint("uq_tenants_name", "tenants", ["name"])
    op.drop_index("uq_tenants_parent_id_name", table_name="tenants")
