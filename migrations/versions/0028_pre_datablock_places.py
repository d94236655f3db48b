"""pre: record on which devices' hosts a datablock lies, so that other hosts can fetch it there."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the API
    now = sa.text("now()")
    op.create_table(
        "datablock_places",
        sa.Column("datablock_id", sa.Text(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=now, nullable=False),
        sa.ForeignKeyConstraint(
            ["datablock_id"], ["datablocks.id"], name="fk_datablock_places_datablock_id_datablocks"
        ),
        sa.ForeignKeyConstraint(
            ["device_id"], ["devices.id"], name="fk_datablock_places_device_id_devices"
        ),
        sa.PrimaryKeyConstraint("datablock_id", "device_id", name="pk_datablock_places"),
    )


def downgrade() -> None:
    op.drop_table("datablock_places")
