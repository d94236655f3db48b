"""pre: let users be deleted: their rows stay for the history, and their names become free."""

import sqlalchemy as sa
from alembic import op

revision = "0079"
down_revision = "0078"
branch_labels = None
depends_on = None

UNIQUE = "uq_users_tenant_id_name"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the service
    op.add_column("users", sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True))
    op.drop_constraint(UNIQUE, "users")
    columns, living = ["tenant_id", "name"], sa.text("deleted_at is null")
    op.create_index(UNIQUE, "users", columns, unique=True, postgresql_where=living)


def downgrade() -> None:
    op.drop_index(UNIQUE, "users")
    # names that were used again must differ
    op.execute("update users set name = name || ' ' || right(id, 8) where deleted_at is not null")
    op.create_unique_constraint(UNIQUE, "users", ["tenant_id", "name"])
    op.drop_column("users", "deleted_at")
