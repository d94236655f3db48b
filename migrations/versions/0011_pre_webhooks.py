"""pre: keep the webhooks that are called when a request ends, and every message to them."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

PENDING = sa.text("state = 'pending'")
TAKEN = sa.text("state = 'pending' and taken_until is not null")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=True),
        _list("events"),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("old_secret", sa.Text(), nullable=True),
        _at("old_secret_until"),
        _at("rotated_at"),
        _at("disabled_at"),
        _now("created_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhooks")),
        _to("webhooks", "tenant_id", "tenants"),
    )
    op.create_index("ix_webhooks_tenant_id_id", "webhooks", ["tenant_id", "id"])
    op.create_index(
        "uq_webhooks_addressless",
        "webhooks",
        ["tenant_id"],
        unique=True,
        postgresql_where=sa.text("url is null"),
    )

    op.create_table(
        "deliveries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("round_from", sa.Integer(), server_default="0", nullable=False),
        _list("attempts"),
        _now("due_at"),
        _at("taken_until"),
        _now("created_at"),
        _at("ended_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
        _to("deliveries", "webhook_id", "webhooks", ondelete="CASCADE"),
        _to("deliveries", "tenant_id", "tenants"),
        _to("deliveries", "request_id", "requests"),
        sa.CheckConstraint(
            "state in ('pending', 'delivered', 'given_up')", name=op.f("ck_deliveries_state")
        ),
    )
    op.create_index("ix_deliveries_request_id", "deliveries", ["request_id"])
    op.create_index("ix_deliveries_webhook_id_id", "deliveries", ["webhook_id", "id"])
    due = ["webhook_id", "due_at"]
    op.create_index("ix_deliveries_due", "deliveries", due, postgresql_where=PENDING)
    op.create_index("ix_deliveries_taken", "deliveries", ["tenant_id"], postgresql_where=TAKEN)


def downgrade() -> None:
    for table in ("deliveries", "webhooks"):
        op.drop_table(table)


def _at(name: str) -> sa.Column:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=True)


def _now(name: str) -> sa.Column:
    now = sa.text("now()")
    return sa.Column(name, sa.DateTime(timezone=True), server_default=now, nullable=False)


def _list(name: str) -> sa.Column:
    return sa.Column(name, postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False)


def _to(table: str, column: str, other: str, **more: str) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_{column}_{other}")
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=name, **more)
