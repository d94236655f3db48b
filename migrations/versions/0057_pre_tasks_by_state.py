"""pre: add an index for the newest tasks of a tenant in a state."""

from alembic import op

revision = "0057"
down_revision = "0056"
branch_labels = None
depends_on = None

NAME = "ix_tasks_tenant_id_state_id"


def upgrade() -> None:
    with op.get_context().autocommit_block():  # the table may be large, and is written meanwhile
        op.drop_index(NAME, "tasks", if_exists=True, postgresql_concurrently=True)  # a broken one
        op.create_index(NAME, "tasks", ["tenant_id", "state", "id"], postgresql_concurrently=True)


def downgrade() -> None:
    with op.get_context().autocommit_block():
        op.drop_index(NAME, "tasks", postgresql_concurrently=True)
