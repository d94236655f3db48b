"""pre: keep sums of usage by day, of which a trigger adds each row that is an hour wide or wider."""

import sqlalchemy as sa
from alembic import op

revision = "0060"
down_revision = "0059"
branch_labels = None
depends_on = None

ADD = """
create or replace function add_to_day() returns trigger language plpgsql as $$ begin
  insert into daily_usage (day, tenant_id, user_id, kind, held_us, charged_us)
    values (date_bin('1 day', new.bucket, 'epoch'), new.tenant_id, new.user_id, new.kind,
      new.held_us - coalesce(old.held_us, 0), new.charged_us - coalesce(old.charged_us, 0))
    on conflict on constraint pk_daily_usage do update set
      held_us = daily_usage.held_us + excluded.held_us,
      charged_us = daily_usage.charged_us + excluded.charged_us;
  return null;
end $$
"""
TRIGGER = """
create trigger add_to_day after insert or update on usage
  for each row when (new.bucket_s >= 3600) execute function add_to_day()
"""

#: Sums up what was there before the trigger, four weeks at a time.  Nothing else writes usage
#: meanwhile, so the sums also hold what the trigger has added since, and replace it.
FILL = """
do $$ declare
  first timestamptz := (select date_bin('28 days', min(bucket), 'epoch') from usage);
  last timestamptz := (select max(bucket) from usage);
begin
  while first <= last loop
    set local lock_timeout = '5s';
    lock table usage in share row exclusive mode;
    insert into daily_usage (day, tenant_id, user_id, kind, held_us, charged_us)
      select date_bin('1 day', bucket, 'epoch') as day, tenant_id, user_id, kind,
        sum(held_us), sum(charged_us)
      from usage
      where bucket >= first and bucket < first + interval '672 hours' and bucket_s >= 3600
      group by day, tenant_id, user_id, kind
      on conflict on constraint pk_daily_usage do update set
        held_us = excluded.held_us, charged_us = excluded.charged_us;
    commit;
    first := first + interval '672 hours';
  end loop;
end $$
"""


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")  # rather fail than stop the island

    op.execute("drop trigger if exists add_to_day on usage")  # of an upgrade that was interrupted
    op.execute("drop table if exists daily_usage")
    op.create_table(
        "daily_usage",
        sa.Column("day", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("held_us", sa.BigInteger(), nullable=False),
        sa.Column("charged_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day", "tenant_id", "user_id", "kind", name="pk_daily_usage"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_daily_usage_tenant_id_tenants"
        ),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name="fk_daily_usage_user_id_users"),
    )
    op.execute(ADD)
    op.execute(TRIGGER)
    with op.get_context().autocommit_block():
        op.execute(FILL)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '5s'")

    op.execute("drop trigger add_to_day on usage")
    op.execute("drop function add_to_day()")
    op.drop_table("daily_usage")
