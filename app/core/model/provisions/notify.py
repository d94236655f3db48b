"""Reads `notify` of a request: the URL that is called, or the channels that are told, and for what.

`core.webhooks` makes the messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from app.core.model.fields import NAME, NAME_RULE, Fields

ENDS = ("done", "failed", "cancelled")
HELD = "held"  # a lot makes no more members, since too many failed
TOLD = (*ENDS, HELD)  # what webhooks may tell of a request
#: What a channel may tell of a request, and the types of these events.
EVENTS = {
    "started": ("request.started",),
    "preempted": ("task.preempted",),
    "resumed": ("task.resumed",),
    "moved": ("task.moved",),
    "stalled": ("task.stalled",),
    "retrying": ("task.retrying",),
    "failed": ("task.failed", "request.failed"),
    "done": ("request.done",),
    "cancelled": ("request.cancelled",),
    HELD: ("request.held",),
}
MOST_CHANNELS = 20  # that a request may name

_URL = re.compile(r"https?://[^\s/]\S*")
_TOLD_BY_URL = re.compile("|".join(TOLD))
_TOLD_TO_CHANNELS = re.compile("|".join(EVENTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Names a URL that is called for these ends of a request."""

    webhook: str
    on: tuple[str, ...] = ENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelWish:
    """Names a channel, and the EVENTS that are told there."""

    to: str
    on: tuple[str, ...] = ENDS

    @property
    def types(self) -> tuple[str, ...]:
        return types_of(self.on)


def types_of(events: Iterable[str]) -> tuple[str, ...]:
    """Return the types of these EVENTS."""
    return tuple(type_ for event in events for type_ in EVENTS[event])


def read_notify(fields: Fields) -> Notify | tuple[ChannelWish, ...] | None:
    """Read `notify`: an object with a URL, or a list of channels."""
    if isinstance(fields.body.get("notify"), list):
        return read_channels(fields, "notify")
    inside = fields.inside("notify")
    if not inside.given:
        return None
    inside.require("webhook")
    notify = Notify(
        webhook=inside.text("webhook", "", _URL, "an http or https address"),
        on=inside.texts("on", _TOLD_BY_URL, f"of {', '.join(TOLD)}") or ENDS,
    )
    inside.close()
    return notify


def read_channels(fields: Fields, key: str) -> tuple[ChannelWish, ...]:
    """Read a list of channels, each of which may be named once."""
    found, seen = [], set[str]()
    for where, body in fields.items(key, least=0, most=MOST_CHANNELS):
        inside = Fields(body, where, fields.faults)
        inside.require("to")
        wish = ChannelWish(
            to=inside.text("to", "", NAME, f"the name of a channel: {NAME_RULE}"),
            on=inside.texts("on", _TOLD_TO_CHANNELS, f"of {', '.join(EVENTS)}") or ENDS,
        )
        inside.close()
        if wish.to and wish.to in seen:
            inside.fault("to", f"the channel {wish.to!r} is named twice", "twice")
        seen.add(wish.to)
        found.append(wish)
    return tuple(found)
