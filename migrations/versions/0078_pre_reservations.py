"""pre: let devices be reserved for tenants and users, and taken out of service, in windows."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0078"
down_revision = "0077"
branch_labels = None
depends_on = None

OWNERS = ("tenants", "users")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for owner in OWNERS:
        op.add_column(owner, sa.Column("reserved", JSONB(), server_default="{}", nullable=False))
    op.add_column("devices", sa.Column("maintenance", sa.Text(), server_default="", nullable=False))
    # a change that its island must see
    op.execute(
        "create trigger touch_maintenance before update of maintenance on devices"
        " for each row execute function touch()"
    )
    op.create_table(
        "reservations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("island", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("user_id", sa.Text(), nullable=True),
        sa.Column("devices", JSONB(), server_default="{}", nullable=False),
        sa.Column("device_ids", JSONB(), server_default="[]", nullable=False),
        sa.Column("begins_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("rule", sa.Text(), server_default="", nullable=False),
        sa.Column("timezone", sa.Text(), server_default="UTC", nullable=False),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.Column("created_by", sa.Text(), server_default="", nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.PrimaryKeyConstraint("id", name="pk_reservations"),
        sa.UniqueConstraint("name", name="uq_reservations_name"),
        sa.ForeignKeyConstraint(
            ["island"], ["islands.name"], name="fk_reservations_island_islands"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"],
            ["tenants.id"],
            name="fk_reservations_tenant_id_tenants",
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_reservations_user_id_users"),
    )
    op.create_index("ix_reservations_tenant_id", "reservations", ["tenant_id"])
    op.create_index("ix_reservations_user_id", "reservations", ["user_id"])
    op.create_table(
        "reservation_windows",
        sa.Column("reservation_id", sa.Text(), nullable=False),
        sa.Column("begins_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("in_force", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.PrimaryKeyConstraint("reservation_id", "begins_at", name="pk_reservation_windows"),
        sa.ForeignKeyConstraint(
            ["reservation_id"],
            ["reservations.id"],
            name="fk_reservation_windows_reservation_id_reservations",
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_reservation_windows_ends_at", "reservation_windows", ["ends_at"])


def downgrade() -> None:
    op.drop_table("reservation_windows")
    op.drop_table("reservations")
    op.execute("drop trigger touch_maintenance on devices")
    op.drop_column("devices", "maintenance")
    for owner in OWNERS:
        op.drop_column(owner, "reserved")
