"""pre: record when rows changed, which tasks wait in which line, and why decisions were made."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from app.db.models import Xid8

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

FOLLOWED = ("tasks", "accounts", "devices", "hosts", "tenants", "users")
WAITING = sa.text("state = 'waiting'")


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    op.execute(
        "create function touch() returns trigger language plpgsql as"
        " $$ begin new.txid := pg_current_xact_id(); return new; end $$"
    )
    for table in FOLLOWED:
        column = sa.Column(
            "txid", Xid8(), server_default=sa.text("pg_current_xact_id()"), nullable=False
        )
        op.add_column(table, column)
        op.execute(
            f"create trigger touch before update on {table} for each row execute function touch()"
        )
        if table != "tasks":
            op.create_index(f"ix_{table}_txid", table, ["txid"])
    op.create_index("ix_tasks_island_txid", "tasks", ["island", "txid"])

    op.add_column("tasks", sa.Column("waiting_since", sa.DateTime(timezone=True), nullable=True))
    op.add_column(
        "tasks", sa.Column("waited_us", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.add_column(
        "tasks",
        sa.Column("away", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
    )
    op.create_index(
        "ix_tasks_line",
        "tasks",
        [
            "island",
            "user_id",
            "kind",
            "memory_bytes",
            "devices_min",
            sa.text("priority desc"),
            "submitted_at",
            "id",
        ],
        postgresql_where=WAITING,
    )
    op.create_index(
        "ix_tasks_not_before",
        "tasks",
        ["island", "not_before"],
        postgresql_where=sa.text("state = 'blocked' and not_before is not null"),
    )

    op.create_table(
        "lines",
        sa.Column("island", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("waiting", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint(
            "island", "user_id", "kind", "memory_bytes", "width", name=op.f("pk_lines")
        ),
        sa.ForeignKeyConstraint(["island"], ["islands.name"], name=op.f("fk_lines_island_islands")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_lines_user_id_users")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_lines_tenant_id_tenants")
        ),
    )
    op.execute(
        "insert into lines (island, user_id, kind, memory_bytes, width, tenant_id, waiting)"
        " select island, user_id, kind, memory_bytes, devices_min, min(tenant_id), count(*)"
        " from tasks where state = 'waiting' and island is not null"
        " group by island, user_id, kind, memory_bytes, devices_min"
    )

    op.create_table(
        "cycles",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("island", sa.Text(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("now_s", sa.Float(), nullable=False),
        sa.Column("snapshot", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cycles")),
        sa.ForeignKeyConstraint(
            ["island"], ["islands.name"], name=op.f("fk_cycles_island_islands")
        ),
    )
    op.create_index("ix_cycles_at", "cycles", ["at"])

    op.create_table(
        "decisions",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("cycle_id", sa.BigInteger(), nullable=False),
        sa.Column(
            "at",
            sa.DateTime(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("move", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("because", sa.Text(), nullable=False),
        sa.Column("devices", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("against", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decisions")),
        sa.ForeignKeyConstraint(
            ["cycle_id"],
            ["cycles.id"],
            name=op.f("fk_decisions_cycle_id_cycles"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_decisions_task_id_tasks")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_decisions_tenant_id_tenants")
        ),
    )
    op.create_index("ix_decisions_tenant_id_id", "decisions", ["tenant_id", "id"])
    op.create_index("ix_decisions_cycle_id", "decisions", ["cycle_id"])

    op.drop_column("tasks", "place")
    op.drop_column("tasks", "reasons")


def downgrade() -> None:
    op.add_column("tasks", sa.Column("place", sa.Integer(), nullable=True))
    op.add_column(
        "tasks",
        sa.Column("reasons", postgresql.JSONB(), server_default=sa.text("'[]'"), nullable=False),
    )
    for table in ("decisions", "cycles", "lines"):
        op.drop_table(table)
    for name in ("ix_tasks_not_before", "ix_tasks_line", "ix_tasks_island_txid"):
        op.drop_index(name, table_name="tasks")
    for name in ("away", "waited_us", "waiting_since"):
        op.drop_column("tasks", name)
    for table in FOLLOWED:
        op.execute(f"drop trigger touch on {table}")
        op.drop_column(table, "txid")
    op.execute("drop function touch()")
