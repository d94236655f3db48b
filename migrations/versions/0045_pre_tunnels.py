"""pre: keep tunnels into running tasks."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None

TIMES = ("opened_at", "seen_at", "active_at", "ended_at")


def upgrade() -> None:
    now = sa.DateTime(timezone=True)
    op.create_table(
        "tunnels",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("asked", JSONB(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("call", JSONB(), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("ticket_sha256", sa.Text(), nullable=False),
        sa.Column("created_at", now, server_default=sa.func.now(), nullable=False),
        sa.Column("expires_at", now, nullable=False),
        *(sa.Column(name, now, nullable=True) for name in TIMES),
        sa.Column("sent_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("received_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("kind in ('shell', 'forward')", name="ck_tunnels_kind"),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name="fk_tunnels_task_id_tasks"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_tunnels_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("id", name="pk_tunnels"),
        sa.UniqueConstraint("ticket_sha256", name="uq_tunnels_ticket_sha256"),
    )
    for column in ("task_id", "tenant_id"):
        op.create_index(f"ix_tunnels_{column}_ended_at", "tunnels", [column, "ended_at"])


def downgrade() -> None:
    op.drop_table("tunnels")
