"""Makes the messages of channels: what happened to which request, in the form of each kind.

A text has names, counts and a link. It never has parameters, variables, lines of a log, or the
message of a failure, since each of these could hold a secret, and a channel has many readers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from app.core.fairness.budget import ALL
from app.core.webhooks.grouping import FAILURE
from app.core.webhooks.message_bodies import TEST, message_body

KINDS = ("webhook", "slack", "teams", "mail")
MAIL = "mail"
BUDGET = "budget.reached"  # type of the message about a budget
NAMED = 5  # most requests and tasks that a message names; it counts the others

_OF_REQUEST = {
    "request.started": "has started",
    "request.done": "is done",
    "request.failed": "has failed",
    "request.cancelled": "was cancelled",
    "request.held": "is held: more members failed than max_failures allows",
}
_OF_TASKS = {
    "task.preempted": "was preempted",
    "task.resumed": "goes on",
    "task.moved": "was moved to another device",
    "task.stalled": "holds a device and makes no progress",
    "task.retrying": "failed or lost its device, and starts again",
    "task.failed": "has failed",
}
_TOLD_OF_MANY = {
    "request.started": "have started",
    "request.done": "are done",
    "request.failed": "have failed",
    "request.cancelled": "were cancelled",
    "request.held": "are held",
    "task.preempted": "were preempted",
    "task.resumed": "go on",
    "task.moved": "were moved",
    "task.stalled": "have a task that makes no progress",
    "task.retrying": "start tasks again",
    "task.failed": "have a task that failed",
}


_FOLLOWS = {
    "notify": "",
    "demote": "; its tasks get only devices that nobody else wants",
    "hold": "; nothing new starts until the next period",
    "pause": "; its tasks are paused until the next period",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTold:
    """Names what a message tells of one request.

    `tasks` are the first names of the tasks that it is about, `count` how often it happened, `ends`
    how many of all tasks have ended in which state.  `link` is the request's page, or "".
    """

    id: str
    name: str
    link: str = ""
    tasks: Sequence[str] = ()
    count: int = 1
    ends: Mapping[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name or self.id


def sentence(type_: str, told: Sequence[RequestTold]) -> str:
    """Return what happened, without a full stop."""
    if type_ == TEST:
        return "This is a test message of Roundhouse"
    if len(told) > 1:
        names = _listed([each.title for each in told])
        return f"{len(told)} requests {_TOLD_OF_MANY[type_]}: {names}"
    [one] = told
    if type_ in _OF_REQUEST:
        ends = ", ".join(f"{n:,} {state}" for state, n in one.ends.items() if n)
        return f"{one.title} {_OF_REQUEST[type_]}" + (f" ({ends})" if ends else "")
    if len(one.tasks) > 1:
        names = ", ".join(one.tasks[:NAMED]) + (" and others" if len(one.tasks) > NAMED else "")
        return f"{one.title}: {one.count:,} times a task {_OF_TASKS[type_]} ({names})"
    times = f" {one.count:,} times" if one.count > 1 else ""
    return f"{one.title}: {_listed(one.tasks)} {_OF_TASKS[type_]}{times}"


def body(
    kind: str, type_: str, told: Sequence[RequestTold], *, at: datetime, since: datetime | None
) -> str:
    """Return the message as it is stored, and sent each time; `since` is when it began to happen,
    if that is earlier.
    """
    text = sentence(type_, told)
    if since is not None and sum(each.count for each in told) > 1:
        text += f", since {since:%H:%M} UTC"
    text += ". Its end tells of further failures." if type_ == FAILURE else "."
    if (form := _form(kind, sentence(type_, told), text, told)) is not None:
        return form
    data = {"text": text, "requests": [_data(each) for each in told[: 10 * NAMED]]}
    return message_body(type_, at, {**data, "count": sum(each.count for each in told)})


def budget_body(
    kind: str, owner: str, devices: str, percent: int, action: str, *, at: datetime
) -> str:
    """Return the message that so much of a budget is used, and what follows."""
    of = "" if devices == ALL else f" for {devices} devices"
    said = f"{owner}: {percent} % of the budget{of} is used"
    text = f"{said}{_FOLLOWS[action]}."
    if (form := _form(kind, said, text, ())) is not None:
        return form
    data = {"text": text, "owner": owner, "kind": devices, "percent": percent, "action": action}
    return message_body(BUDGET, at, data)


def _form(kind: str, subject: str, text: str, told: Sequence[RequestTold]) -> str | None:
    """Return a text in the form of a chat or of mail; None for a webhook, which gets data."""
    match kind:
        case "slack":
            return _json(_slack(text, told))
        case "teams":
            return _json(_teams(text, told))
        case "mail":
            return _json({"subject": f"Roundhouse: {subject}", "text": _mail(text, told)})
    return None


def _slack(text: str, told: Sequence[RequestTold]) -> dict[str, Any]:
    """Return the body for an incoming webhook of Slack, and of programs that take the same."""
    links = [f"<{each.link}|{_escaped(each.title)}>" for each in _linked(told)]
    return {"text": "\n".join([_escaped(text), *links]), "unfurl_links": False}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _teams(text: str, told: Sequence[RequestTold]) -> dict[str, Any]:
    """Return the body for a webhook of Teams' workflows: an adaptive card.

    A text run is no Markdown, so nothing in a name is read as a link.
    """
    words = {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text}]}
    links = [
        {"type": "Action.OpenUrl", "title": each.title, "url": each.link} for each in _linked(told)
    ]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [words],
        **({"actions": links} if links else {}),
    }
    content = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [content]}


def _mail(text: str, told: Sequence[RequestTold]) -> str:
    return "\n".join([text, "", *(f"{each.title}: {each.link}" for each in _linked(told))])


def _data(told: RequestTold) -> dict[str, Any]:
    return {
        "id": told.id,
        "name": told.name,
        "link": told.link or None,
        "tasks": list(told.tasks),
        "count": told.count,
        "ends": dict(told.ends),
    }


def _linked(told: Sequence[RequestTold]) -> list[RequestTold]:
    return [each for each in told[:NAMED] if each.link]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"


def _json(body: Any) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
