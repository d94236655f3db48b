"""Makes messages to channels from what happened to requests.

What happened is written as news, in the transaction in which it happened. Control groups news into
messages (`core.webhooks.grouping`) and deletes them in one transaction, so each becomes part of
exactly one message. `messaging.webhooks` delivers it, with the same id each time.

Control locks channels, and waits for no lock. Islands never lock them, only rows of
`request_channels`, which refer to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from app.core.model.lifecycle import ENDED
from app.core.webhooks import channel_texts, grouping
from app.core.webhooks.channel_texts import RequestTold
from app.core.webhooks.grouping import RecentMessages, RequestNews
from app.db import transactions
from app.db.ids import id_at, new_id
from app.db.models import Delivery, NewsItem, Webhook
from app.settings import settings

CHANNELS_AT_ONCE = 20
REQUESTS_AT_ONCE = 500
ENDINGS = frozenset(f"request.{end}" for end in ENDED)

# Each type of news of a request, with what was told of it before.
_NEWS = text(
    """
    with due as (
        select distinct request_id from news where webhook_id = :channel and due_at <= now()
        order by request_id limit :most
    )
    select n.request_id, n.type, array_agg(n.id) as ids, sum(n.count)::int as times,
        min(n.at) as since,
        (array_agg(distinct n.task) filter (where n.task <> ''))[1:10] as tasks,
        r.name, r.user_id, r.state, (c.told ->> n.type)::float as told_at_s
    from due join news n on n.webhook_id = :channel and n.request_id = due.request_id
    join request_channels c on c.webhook_id = :channel and c.request_id = n.request_id
    join requests r on r.id = n.request_id
    group by n.request_id, n.type, r.name, r.user_id, r.state, c.told
    order by n.request_id, n.type
    """
)

_RECENT = text(
    """
    select r.user_id, d.type, count(*) as times, max(d.created_at) as last_at
    from deliveries d join requests r on r.id = d.request_id
    where d.webhook_id = :channel and d.id > :since
    group by r.user_id, d.type
    """
)

_ENDS = text(
    """
    select t.request_id, each.state, sum(each.n)::int as n
    from tasks t left join lots l on l.id = t.id cross join lateral (values
        (1, 'done', coalesce(l.done, cast(t.state = 'done' as int))),
        (2, 'failed', coalesce(l.failed, cast(t.state = 'failed' as int))),
        (3, 'cancelled', coalesce(l.cancelled, cast(t.state = 'cancelled' as int)))
    ) as each (place, state, n)
    where t.request_id = any(:ids) and t.lot_index is null
        and (t.gang_id is null or t.gang_id = t.id)
    group by t.request_id, each.place, each.state order by t.request_id, each.place
    """
)

_TOLD = text(
    """
    update request_channels
    set told = (told - cast(:forgotten as text[]))
        || jsonb_build_object(cast(:type as text), cast(:now_s as float))
    where webhook_id = :channel and request_id = any(:ids)
    """
)


def write_messages(session: Session) -> bool:
    """Make the messages that are due; True if there may be more.

    Channels with which another control is busy are left to it.
    """
    due = select(NewsItem.webhook_id).where(NewsItem.due_at <= func.now()).distinct()
    query = select(Webhook).where(Webhook.id.in_(due)).order_by(Webhook.id)
    free = query.limit(CHANNELS_AT_ONCE).with_for_update(key_share=True, skip_locked=True)
    channels = session.scalars(free).all()
    return any([_tell(session, channel) for channel in channels])


def _tell(session: Session, channel: Webhook) -> bool:
    """Make the messages of a channel; True if it may have more."""
    if channel.disabled_at is not None:
        session.execute(delete(NewsItem).where(NewsItem.webhook_id == channel.id))
        return False
    given = {"channel": channel.id, "most": REQUESTS_AT_ONCE}
    rows = session.execute(_NEWS, given).all()
    hour_ago_s = transactions.now_s(session) - grouping.HOUR_S
    recent = {
        (row.user_id, row.type): RecentMessages(count=row.times, last_at_s=row.last_at.timestamp())
        for row in session.execute(_RECENT, given | {"since": id_at("msg", hour_ago_s)})
    }
    by_group, done = defaultdict[tuple[str, str], dict[RequestNews, Any]](dict), list[int]()
    for row in rows:
        news = RequestNews(
            request=row.request_id,
            type=row.type,
            count=row.times,
            told_at_s=row.told_at_s,
            has_ended=row.state in ENDED,
        )
        done += row.ids
        if not news.is_needless:
            by_group[row.user_id, row.type][news] = row
    # an array, since a statement takes at most 65,535 values
    session.execute(text("delete from news where id = any(:done)"), {"done": done})
    for key, found in by_group.items():
        now_s = transactions.now_s(session)
        grouped = grouping.group(list(found), recent.get(key, RecentMessages()), now_s)
        for message in grouped.messages:
            _write(session, channel, key[1], [found[news] for news in message])
        session.add_all(_later(channel, found[news], due_s) for news, due_s in grouped.waiting)
    return len({row.request_id for row in rows}) >= REQUESTS_AT_ONCE


def _write(session: Session, channel: Webhook, type_: str, rows: Sequence[Any]) -> None:
    """Write a message about these requests, and note that they were told."""
    ids = [row.request_id for row in rows]
    ends = _ends(session, ids) if type_ in ENDINGS else {}
    link = settings().public_url.rstrip("/")
    told = [
        RequestTold(
            id=row.request_id,
            name=row.name,
            link=f"{link}/ui/requests/{row.request_id}" if link else "",
            tasks=_tasks(row),
            count=row.times,
            ends=ends.get(row.request_id, {}),
        )
        for row in rows
    ]
    now, since = transactions.now(session), min(row.since for row in rows)
    session.add(
        Delivery(
            id=new_id("msg"),
            webhook_id=channel.id,
            tenant_id=channel.tenant_id,
            request_id=ids[-1],
            url=channel.url,
            type=type_,
            body=channel_texts.body(str(channel.kind), type_, told, at=now, since=since),
        )
    )
    forgotten = [grouping.FAILURE] if type_ in ENDINGS else []
    given = {"channel": channel.id, "ids": ids, "type": type_, "forgotten": forgotten}
    session.execute(_TOLD, given | {"now_s": now.timestamp()})


def _later(channel: Webhook, row: Any, due_s: float) -> NewsItem:
    """Return all this news as one item, at which control looks again at `due_s`."""
    return NewsItem(
        request_id=row.request_id,
        webhook_id=channel.id,
        type=row.type,
        task=",".join(_tasks(row)),
        count=row.times,
        at=row.since,
        due_at=datetime.fromtimestamp(due_s, UTC),
    )


def _tasks(row: Any) -> list[str]:
    """Return the first names of the tasks that the news is about."""
    listed = (name for names in row.tasks or () for name in names.split(","))
    return list(dict.fromkeys(listed))[: channel_texts.NAMED + 1]


def _ends(session: Session, ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return, by request, how many of its tasks have ended in which state; members of lots
    count.
    """
    found = defaultdict[str, dict[str, int]](dict)
    for id, state, n in session.execute(_ENDS, {"ids": list(ids)}):
        found[id][state] = n
    return found
