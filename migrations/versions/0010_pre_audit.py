"""pre: keep an append-only, chained audit log of administrators; count what a scheduler does."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    op.create_table(
        "audit_events",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=True),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("user_tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("operation", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target_kind", sa.Text(), nullable=False),
        sa.Column("target_id", sa.Text(), nullable=False),
        sa.Column("before", sa.JSON(), nullable=False),
        sa.Column("after", sa.JSON(), nullable=False),
        sa.Column("previous", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
        sa.UniqueConstraint("previous", name=op.f("uq_audit_events_previous")),
        sa.CheckConstraint(
            "action in ('made', 'changed', 'removed', 'asked', 'read', 'refused')",
            name=op.f("ck_audit_events_action"),
        ),
    )
    op.create_index("ix_audit_events_tenant_id_id", "audit_events", ["tenant_id", "id"])
    op.execute(
        "create function audit_events_stay() returns trigger language plpgsql as $$ begin"
        " raise exception 'audit_events is append-only: % is refused', tg_op"
        " using errcode = 'restrict_violation'; end $$"
    )
    op.execute(
        "create trigger stay before update or delete or truncate on audit_events"
        " for each statement execute function audit_events_stay()"
    )

    op.add_column(
        "islands",
        sa.Column("tally", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False),
    )
    op.add_column("islands", sa.Column("tallied_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    for column in ("tallied_at", "tally"):
        op.drop_column("islands", column)
    op.drop_table("audit_events")
    op.execute("drop function audit_events_stay()")
