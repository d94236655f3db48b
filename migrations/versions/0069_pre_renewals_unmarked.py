"""pre: let a renewal of a lease mark no device as changed."""

from alembic import op

revision = "0069"
down_revision = "0068"
branch_labels = None
depends_on = None

#: The columns of `devices` that a renewal leaves as they are; the others are those of its lease.
MARKING = (
    "id",
    "host",
    "island",
    "kind",
    "threads",
    "memory_bytes",
    "cost_milli",
    "cordoned",
    "incarnation",
    "grace_us",
    "facts",
    "links",
    "secret",
    "health",
    "fitness",
    "version",
    "created_at",
)

#: A lease that begins, is shortened, or is renewed when it has ended or nearly has, is a change
#: that the island must see. The margin is for clocks that are set back.
LEASE_MARKS = """
    old.lease_until is null or new.lease_until is null or new.lease_until < old.lease_until
    or old.lease_until < clock_timestamp() + interval '2 seconds'
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island
    op.execute("drop trigger touch on devices")
    op.execute(
        f"create trigger touch before update of {', '.join(MARKING)} on devices"
        " for each row execute function touch()"
    )
    op.execute(
        "create trigger touch_lease before update of lease_until on devices"
        f" for each row when ({LEASE_MARKS}) execute function touch()"
    )


def downgrade() -> None:
    op.execute("drop trigger touch_lease on devices")
    op.execute("drop trigger touch on devices")
    op.execute(
        "create trigger touch before update on devices for each row execute function touch()"
    )
