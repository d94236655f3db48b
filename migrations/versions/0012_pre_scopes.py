"""pre: add users that are programs, keys with scopes, and keys that replace other keys."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

REPLACED = "fk_api_keys_replaced_by_api_keys"


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    service = sa.Column("service", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    op.add_column("users", service)
    op.add_column("api_keys", sa.Column("scopes", postgresql.JSONB(), nullable=True))
    op.add_column("api_keys", sa.Column("replaced_by", sa.Text(), nullable=True))
    op.create_foreign_key(op.f(REPLACED), "api_keys", "api_keys", ["replaced_by"], ["id"])


def downgrade() -> None:
    # Without its scopes a key could do more than it was made for.
    op.execute(
        "update api_keys set revoked_at = coalesce(revoked_at, now()) where scopes is not null"
    )
    op.drop_constraint(REPLACED, "api_keys", type_="foreignkey")
    for column in ("replaced_by", "scopes"):
        op.drop_column("api_keys", column)
    op.drop_column("users", "service")
