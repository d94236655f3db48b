"""pre: add an index of the requests that a tenant keeps, to count and list them."""

from alembic import op
from sqlalchemy import text

revision = "0061"
down_revision = "0060"
branch_labels = None
depends_on = None

NAME = "ix_requests_kept"


def upgrade() -> None:
    with op.get_context().autocommit_block():  # the table may be large, and is written meanwhile
        op.drop_index(
            NAME, "requests", if_exists=True, postgresql_concurrently=True
        )  # a broken one
        op.create_index(
            NAME,
            "requests",
            ["tenant_id", "id"],
            postgresql_where=text("keep"),
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    with op.get_context().autocommit_block():
        op.drop_index(NAME, "requests", postgresql_concurrently=True)
