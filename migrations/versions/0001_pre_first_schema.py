"""pre: make the first schema."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.db.models import Xid8

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    op.create_table(
        "islands",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("leader", sa.Text(), nullable=True),
        sa.Column("leader_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("leading_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("term", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_islands")),
    )
    op.create_table(
        "ledger",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("half_life_s", sa.Double(), nullable=False),
        sa.Column("since_s", sa.Double(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_ledger_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger")),
    )
    op.create_table(
        "presets",
        sa.Column("task_type", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "params",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("version", sa.Integer(), server_default="1", nullable=False),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("task_type", "kind", name=op.f("pk_presets")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("weight_milli", sa.BigInteger(), server_default="1000", nullable=False),
        sa.Column("version", sa.Integer(), server_default="1", nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("weight_milli > 0", name=op.f("ck_tenants_weight_milli")),
        sa.ForeignKeyConstraint(
            ["parent_id"], ["tenants.id"], name=op.f("fk_tenants_parent_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "bundles",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "entry_points",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_bundles_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "sha256", name=op.f("pk_bundles")),
    )
    op.create_table(
        "hosts",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("island", sa.Text(), nullable=False),
        sa.Column("cordoned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["island"], ["islands.name"], name=op.f("fk_hosts_island_islands")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_hosts")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_users_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_users_tenant_id_name")),
    )
    op.create_table(
        "accounts",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("faded", sa.Numeric(precision=1000, scale=0), server_default="0", nullable=False),
        sa.Column("total_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_accounts_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_accounts_user_id_users")),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_accounts")),
    )
    op.create_index(op.f("ix_accounts_tenant_id"), "accounts", ["tenant_id"], unique=False)
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "role in ('platform_admin', 'tenant_admin', 'member', 'viewer')",
            name=op.f("ck_api_keys_role"),
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_api_keys_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_user_id"), "api_keys", ["user_id"], unique=False)
    op.create_table(
        "devices",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("island", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("threads", sa.Integer(), server_default="1", nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cost_milli", sa.BigInteger(), server_default="1000", nullable=False),
        sa.Column("cordoned", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("incarnation", sa.Text(), server_default="", nullable=False),
        sa.Column("heard_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "facts",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("version", sa.Integer(), server_default="1", nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["host"], ["hosts.name"], name=op.f("fk_devices_host_hosts")),
        sa.ForeignKeyConstraint(
            ["island"], ["islands.name"], name=op.f("fk_devices_island_islands")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_devices")),
    )
    op.create_index(op.f("ix_devices_island"), "devices", ["island"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("route", sa.Text(), nullable=False),
        sa.Column("body_sha256", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("response", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("location", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_idempotency_user_id_users")
        ),
        sa.PrimaryKeyConstraint("user_id", "key", name=op.f("pk_idempotency")),
    )
    op.create_table(
        "requests",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="queued", nullable=False),
        sa.Column("tier", sa.Text(), server_default="standard", nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "labels",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column(
            "descriptor",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column(
            "submitted_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state in ('queued', 'running', 'done', 'failed', 'cancelled')",
            name=op.f("ck_requests_state"),
        ),
        sa.CheckConstraint(
            "tier in ('premium', 'standard', 'basic')", name=op.f("ck_requests_tier")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_requests_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_requests_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
    )
    op.create_index("ix_requests_tenant_id_id", "requests", ["tenant_id", "id"], unique=False)
    op.create_table(
        "usage",
        sa.Column("bucket", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("bucket_s", sa.Integer(), nullable=False),
        sa.Column("held_us", sa.BigInteger(), nullable=False),
        sa.Column("charged_us", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_usage_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_usage_user_id_users")),
        sa.PrimaryKeyConstraint(
            "bucket", "tenant_id", "user_id", "kind", "bucket_s", name=op.f("pk_usage")
        ),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("island", sa.Text(), nullable=True),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "descriptor",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("memory_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("priority", sa.Integer(), server_default="0", nullable=False),
        sa.Column("hold", sa.Text(), server_default="", nullable=False),
        sa.Column("save_asked", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("cancel_asked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("state", sa.Text(), server_default="blocked", nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("event_seq", sa.Integer(), server_default="0", nullable=False),
        sa.Column("order_seq", sa.Integer(), server_default="0", nullable=False),
        sa.Column("saved", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("seat", sa.Text(), nullable=True),
        sa.Column("image_on", sa.Text(), nullable=True),
        sa.Column("step", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("launched_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("first_started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("held_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("total_held_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("switch_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retry_max", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("pauses", sa.Integer(), server_default="0", nullable=False),
        sa.Column("lost_steps", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column(
            "reasons",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'[]'"),
            nullable=False,
        ),
        sa.Column("place", sa.Integer(), nullable=True),
        sa.Column(
            "metrics",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column(
            "capabilities",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'[]'"),
            nullable=False,
        ),
        sa.Column(
            "preset",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("result", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column(
            "outputs",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column(
            "submitted_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("hold in ('', 'user', 'admin')", name=op.f("ck_tasks_hold")),
        sa.CheckConstraint(
            "state in ('blocked', 'waiting', 'starting', 'running', 'splicing', 'pausing', 'stopping', 'done', 'failed', 'cancelled')",
            name=op.f("ck_tasks_state"),
        ),
        sa.CheckConstraint("epoch >= 0", name=op.f("ck_tasks_epoch")),
        sa.ForeignKeyConstraint(
            ["image_on"], ["devices.id"], name=op.f("fk_tasks_image_on_devices")
        ),
        sa.ForeignKeyConstraint(["island"], ["islands.name"], name=op.f("fk_tasks_island_islands")),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_tasks_request_id_requests")
        ),
        sa.ForeignKeyConstraint(["seat"], ["devices.id"], name=op.f("fk_tasks_seat_devices")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_tasks_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_tasks_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("request_id", "name", name=op.f("uq_tasks_request_id_name")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index(
        "ix_tasks_image_on",
        "tasks",
        ["image_on"],
        unique=False,
        postgresql_where=sa.text("image_on is not null"),
    )
    op.create_index(
        "ix_tasks_live",
        "tasks",
        ["island", "id"],
        unique=False,
        postgresql_where=sa.text("state not in ('done', 'failed', 'cancelled')"),
    )
    op.create_index(op.f("ix_tasks_request_id"), "tasks", ["request_id"], unique=False)
    op.create_index(
        "ix_tasks_save_asked",
        "tasks",
        ["id"],
        unique=False,
        postgresql_where=sa.text("save_asked"),
    )
    op.create_table(
        "web_sessions",
        sa.Column("token_sha256", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name=op.f("fk_web_sessions_key_id_api_keys")
        ),
        sa.PrimaryKeyConstraint("token_sha256", name=op.f("pk_web_sessions")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("took_us", sa.BigInteger(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("damaged_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name=op.f("fk_checkpoints_task_id_tasks")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_checkpoints_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint(
            "task_id", "step", "sha256", name=op.f("uq_checkpoints_task_id_step_sha256")
        ),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("txid", Xid8(), server_default=sa.text("pg_current_xact_id()"), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=True),
        sa.Column("task_id", sa.Text(), nullable=True),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column(
            "data",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["request_id"], ["requests.id"], name=op.f("fk_events_request_id_requests")
        ),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_events_task_id_tasks")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_events_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(
        "ix_events_request_id_txid_id", "events", ["request_id", "txid", "id"], unique=False
    )
    op.create_index(
        "ix_events_tenant_id_txid_id", "events", ["tenant_id", "txid", "id"], unique=False
    )
    op.create_table(
        "logs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_logs_task_id_tasks")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_logs")),
        sa.UniqueConstraint("task_id", "epoch", "line", name=op.f("uq_logs_task_id_epoch_line")),
    )
    op.create_index("ix_logs_task_id_id", "logs", ["task_id", "id"], unique=False)
    op.create_table(
        "metrics",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "values",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_metrics_task_id_tasks")),
        sa.PrimaryKeyConstraint("task_id", "step", name=op.f("pk_metrics")),
    )
    op.create_table(
        "needs",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("needs_id", sa.Text(), nullable=False),
        sa.Column("port", sa.Text(), server_default="", nullable=False),
        sa.Column("output", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["needs_id"], ["tasks.id"], name=op.f("fk_needs_needs_id_tasks")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_needs_task_id_tasks")),
        sa.PrimaryKeyConstraint("task_id", "needs_id", "port", name=op.f("pk_needs")),
    )
    op.create_index(op.f("ix_needs_needs_id"), "needs", ["needs_id"], unique=False)
    op.create_table(
        "orders",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column(
            "body",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("sends", sa.Integer(), server_default="0", nullable=False),
        sa.Column("answered_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["device_id"], ["devices.id"], name=op.f("fk_orders_device_id_devices")
        ),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_orders_task_id_tasks")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_orders")),
        sa.UniqueConstraint("task_id", "epoch", "seq", name=op.f("uq_orders_task_id_epoch_seq")),
    )
    op.create_index(
        "ix_orders_unanswered",
        "orders",
        ["device_id", "id"],
        unique=False,
        postgresql_where=sa.text("answered_at is null"),
    )
    op.create_table(
        "placements",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("cost_milli", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column(
            "launched_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("leaving", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("held_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("charged_us", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("end", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["device_id"], ["devices.id"], name=op.f("fk_placements_device_id_devices")
        ),
        sa.ForeignKeyConstraint(
            ["task_id"], ["tasks.id"], name=op.f("fk_placements_task_id_tasks")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_placements_tenant_id_tenants")
        ),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_placements_user_id_users")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_placements")),
        sa.UniqueConstraint("task_id", "epoch", name=op.f("uq_placements_task_id_epoch")),
    )
    op.create_index("ix_placements_tenant_id_id", "placements", ["tenant_id", "id"], unique=False)
    op.create_index(
        "uq_placements_open_seat",
        "placements",
        ["device_id"],
        unique=True,
        postgresql_where=sa.text("ended_at is null and not leaving"),
    )
    op.create_index(
        "uq_placements_open_task",
        "placements",
        ["task_id"],
        unique=True,
        postgresql_where=sa.text("ended_at is null"),
    )


def downgrade() -> None:

    op.drop_index(
        "uq_placements_open_task",
        table_name="placements",
        postgresql_where=sa.text("ended_at is null"),
    )
    op.drop_index(
        "uq_placements_open_seat",
        table_name="placements",
        postgresql_where=sa.text("ended_at is null and not leaving"),
    )
    op.drop_index("ix_placements_tenant_id_id", table_name="placements")
    op.drop_table("placements")
    op.drop_index(
        "ix_orders_unanswered", table_name="orders", postgresql_where=sa.text("answered_at is null")
    )
    op.drop_table("orders")
    op.drop_index(op.f("ix_needs_needs_id"), table_name="needs")
    op.drop_table("needs")
    op.drop_table("metrics")
    op.drop_index("ix_logs_task_id_id", table_name="logs")
    op.drop_table("logs")
    op.drop_index("ix_events_tenant_id_txid_id", table_name="events")
    op.drop_index("ix_events_request_id_txid_id", table_name="events")
    op.drop_table("events")
    op.drop_table("checkpoints")
    op.drop_table("web_sessions")
    op.drop_index("ix_tasks_save_asked", table_name="tasks", postgresql_where=sa.text("save_asked"))
    op.drop_index(op.f("ix_tasks_request_id"), table_name="tasks")
    op.drop_index(
        "ix_tasks_image_on",
        table_name="tasks",
        postgresql_where=sa.text("image_on is not null"),
    )
    op.drop_index(
        "ix_tasks_live",
        table_name="tasks",
        postgresql_where=sa.text("state not in ('done', 'failed', 'cancelled')"),
    )
    op.drop_table("tasks")
    op.drop_table("usage")
    op.drop_index("ix_requests_tenant_id_id", table_name="requests")
    op.drop_table("requests")
    op.drop_table("idempotency")
    op.drop_index(op.f("ix_devices_island"), table_name="devices")
    op.drop_table("devices")
    op.drop_index(op.f("ix_api_keys_user_id"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_index(op.f("ix_accounts_tenant_id"), table_name="accounts")
    op.drop_table("accounts")
    op.drop_table("users")
    op.drop_table("hosts")
    op.drop_table("bundles")
    op.drop_table("tenants")
    op.drop_table("presets")
    op.drop_table("ledger")
    op.drop_table("islands")
