"""Decides which news become a message now, and which wait so that one message tells several.

A channel that gets each event of each task is soon muted. So a request has at most one message
about the same type of event in WINDOW_S, with a count. Of one user's requests a channel gets at
most AT_ONCE messages of a type in HOUR_S; further ones come together, one in WINDOW_S. A task that
fails is told if it is the first one of its request; the end of the request tells the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 600.0
HOUR_S = 3600.0
AT_ONCE = 10

FAILURE = "task.failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNews:
    """Counts the events of one type in a request; `told_at_s` is when that type was last told, if
    ever.
    """

    request: str
    type: str
    count: int
    told_at_s: float | None = None
    has_ended: bool = False

    @property
    def is_needless(self) -> bool:
        """True if another message tells it: that of the first failure, or of the end."""
        return self.type == FAILURE and (self.has_ended or self.told_at_s is not None)

    @property
    def waits_until_s(self) -> float:
        return 0.0 if self.told_at_s is None else self.told_at_s + WINDOW_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentMessages:
    """Counts the messages to a channel about a user's events of one type in the last HOUR_S."""

    count: int = 0
    last_at_s: float = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Says what becomes of news: `messages` are sent now, each about some requests; `waiting` have
    the time at which they are looked at again.
    """

    messages: tuple[tuple[RequestNews, ...], ...] = ()
    waiting: tuple[tuple[RequestNews, float], ...] = ()


def group(news: Sequence[RequestNews], recent: RecentMessages, now_s: float) -> Grouping:
    """Group news of one type about the requests of one user; none of them is needless."""
    ready = tuple(each for each in news if each.waits_until_s <= now_s)
    waiting = [(each, each.waits_until_s) for each in news if each.waits_until_s > now_s]
    free = AT_ONCE - recent.count
    again_s = recent.last_at_s + WINDOW_S
    messages: list[tuple[RequestNews, ...]] = []
    if len(ready) <= free:
        messages = [(each,) for each in ready]
    elif free > 0 or again_s <= now_s:
        messages = [ready]
    else:
        waiting += [(each, again_s) for each in ready]
    return Grouping(messages=tuple(messages), waiting=tuple(waiting))
