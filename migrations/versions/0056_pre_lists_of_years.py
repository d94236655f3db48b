"""pre: add indexes for lists of requests, and for the tasks that have an output."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0056"
down_revision = "0055"
branch_labels = None
depends_on = None

#: name -> (table, columns, options)
INDEXES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "ix_requests_live": (
        "requests",
        ["id"],
        {"postgresql_where": sa.text("state not in ('done', 'failed', 'cancelled')")},
    ),
    "ix_requests_name": ("requests", ["name", "id"], {}),
    "ix_requests_id_ends": ("requests", [sa.text("right(id, 8)")], {}),
    "ix_requests_labels": (
        "requests",
        ["labels"],
        {"postgresql_using": "gin", "postgresql_ops": {"labels": "jsonb_path_ops"}},
    ),
    # Requests lie in the order of this time, so a few pages of index are enough for a year.
    "ix_requests_submitted_at": ("requests", ["submitted_at"], {"postgresql_using": "brin"}),
    "ix_tasks_outputs": (
        "tasks",
        [sa.text("jsonb_path_query_array(outputs, '$.*.sha256')")],
        {"postgresql_using": "gin", "postgresql_where": sa.text("outputs <> '{}'")},
    ),
}


def upgrade() -> None:
    with op.get_context().autocommit_block():  # the tables may be large, and are written meanwhile
        for name, (table, columns, options) in INDEXES.items():
            op.drop_index(name, table, if_exists=True, postgresql_concurrently=True)  # a broken one
            op.create_index(name, table, columns, postgresql_concurrently=True, **options)


def downgrade() -> None:
    with op.get_context().autocommit_block():
        for name, (table, _, _) in INDEXES.items():
            op.drop_index(name, table, postgresql_concurrently=True)
