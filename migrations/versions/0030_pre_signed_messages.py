"""pre: keep enrolled devices, an island's public key, and a device's secret outside its facts.

Devices that were registered before are not enrolled: anybody who could write to Redis may have
registered them. An administrator enrols the real ones.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    op.create_table(
        "enrolments",
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("enrolled_by", sa.Text(), nullable=False),
        sa.Column(
            "enrolled_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("device_id", name="pk_enrolments"),
    )
    op.add_column("islands", sa.Column("key", sa.Text(), nullable=True))
    empty = sa.text("'[]'")
    op.add_column(
        "devices", sa.Column("links", postgresql.JSONB(), server_default=empty, nullable=False)
    )
    op.add_column(
        "devices", sa.Column("secret", sa.Text(), server_default=sa.text("''"), nullable=False)
    )
    op.execute("UPDATE devices SET facts = facts - 'secret' - 'links'")


def downgrade() -> None:
    op.drop_column("devices", "secret")
    op.drop_column("devices", "links")
    op.drop_column("islands", "key")
    op.drop_table("enrolments")
