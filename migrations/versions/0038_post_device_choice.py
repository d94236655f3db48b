"""post: make the labels that a task avoids a part of its choice of devices."""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    for table in ("tasks", "lines"):
        op.drop_column(table, "avoid_labels")


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")

    labels = (
        "select coalesce(string_agg(substr(item, 2), ',' order by item), '')"
        " from unnest(string_to_array(device_choice, ',')) as item where item like '-%'"
    )
    for table in ("lines", "tasks"):
        column = sa.Column("avoid_labels", sa.Text(), server_default="", nullable=False)
        op.add_column(table, column)
        op.execute(f"update {table} set avoid_labels = ({labels}) where device_choice <> ''")
