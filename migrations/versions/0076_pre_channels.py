"""pre: let requests name channels, and keep what is to be told there until it is a message."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0076"
down_revision = "0075"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    for name, kind in (
        ("name", sa.Text()),
        ("kind", sa.Text()),
        ("key_id", sa.Text()),
        ("encrypted", sa.LargeBinary()),
    ):
        op.add_column("webhooks", sa.Column(name, kind, nullable=True))
    op.create_index("uq_webhooks_name", "webhooks", ["tenant_id", "name"], unique=True)
    usual = sa.Column("notify", postgresql.JSONB(), nullable=True)
    op.add_column("users", usual)
    op.create_table(
        "request_channels",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        _json("events", "[]"),
        _json("told", "{}"),
        sa.PrimaryKeyConstraint("request_id", "webhook_id", name=op.f("pk_request_channels")),
        _to("request_channels", "request_id", "requests"),
        _to("request_channels", "webhook_id", "webhooks"),
    )
    op.create_index("ix_request_channels_webhook_id", "request_channels", ["webhook_id"])
    op.create_table(
        "news",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("count", sa.Integer(), server_default="1", nullable=False),
        _now("at"),
        _now("due_at"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_news")),
        sa.ForeignKeyConstraint(
            ["request_id", "webhook_id"],
            ["request_channels.request_id", "request_channels.webhook_id"],
            name=op.f("fk_news_request_id_request_channels"),
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_news_due_at", "news", ["due_at"])
    op.create_index("ix_news_request_id_webhook_id", "news", ["request_id", "webhook_id"])


def downgrade() -> None:
    op.drop_table("news")
    op.drop_table("request_channels")
    op.drop_column("users", "notify")
    op.execute("delete from webhooks where name is not null")
    op.drop_index("uq_webhooks_name", "webhooks")
    for name in ("name", "kind", "key_id", "encrypted"):
        op.drop_column("webhooks", name)


def _json(name: str, default: str) -> sa.Column:
    default_ = sa.text(f"'{default}'")
    return sa.Column(name, postgresql.JSONB(), server_default=default_, nullable=False)


def _now(name: str) -> sa.Column:
    now = sa.text("now()")
    return sa.Column(name, sa.DateTime(timezone=True), server_default=now, nullable=False)


def _to(table: str, column: str, other: str) -> sa.ForeignKeyConstraint:
    name = op.f(f"fk_{table}_{column}_{other}")
    return sa.ForeignKeyConstraint([column], [f"{other}.id"], name=name, ondelete="CASCADE")
