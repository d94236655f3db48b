"""Finds requests by words, and reads of each the values by which runs are compared in a table."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Text, case, cast, func, select
from sqlalchemy.orm import Session

from app.db.models import Request, Task, User
from app.scheduling.journal.lots import IS_NO_MEMBER

USER = "user"  # the name in `user:ada`; all other names are those of labels
STEP, COMMAND = "step", "command"
READ_MOST = 8192  # characters of a task's parameters, and of its command; longer ones are not read


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSearch:
    """Holds words that a request must all match: parts of its name, its user, its labels."""

    parts: tuple[str, ...] = ()
    user: str = ""
    labels: Mapping[str, str]

    @property
    def conditions(self) -> list[ColumnElement[bool]]:
        found = [Request.name.icontains(part, autoescape=True) for part in self.parts]
        if self.user:
            found.append(Request.user_id.in_(select(User.id).where(User.name == self.user)))
        if self.labels:
            found.append(Request.labels.contains(dict(self.labels)))
        return found


def read_search(text: str) -> RequestSearch:
    """Read words such as `digits user:ada team:vision`."""
    pairs = [word.partition(":") for word in text.split()]
    named = {name: value for name, colon, value in pairs if colon and name}
    return RequestSearch(
        parts=tuple(name for name, colon, _ in pairs if name and not colon),
        user=named.pop(USER, ""),
        labels=named,
    )


def run_values(session: Session, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the values of each request by column: `label.NAME`, and of a request with a single
    task `params.NAME`, `metrics.NAME` with its last value, `step` and `command`.
    """
    found: dict[str, dict[str, Any]] = {}
    for id, labels in session.execute(
        select(Request.id, Request.labels).where(Request.id.in_(ids))
    ):
        found[id] = {f"label.{name}": value for name, value in sorted(labels.items())}
    columns = (
        Task.request_id,
        Task.lot_id,
        Task.metrics,
        Task.step,
        _if_short(Task.descriptor["params"]).label("params"),
        _if_short(Task.descriptor["run"]["command"]).label("command"),
    )
    tasks = defaultdict(list)
    for row in session.execute(select(*columns).where(Task.request_id.in_(ids), IS_NO_MEMBER)):
        tasks[row.request_id].append(row)
    for id, rows in tasks.items():
        if len(rows) == 1 and rows[0].lot_id is None:
            found[id] |= _values(rows[0])
    return found


def _if_short(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return the JSON value, or null for a long one: 500 requests may have 128 MB of parameters."""
    return case((func.length(cast(value, Text)) <= READ_MOST, value))


def _values(task: Any) -> dict[str, Any]:
    return {
        **{f"params.{name}": value for name, value in sorted((task.params or {}).items())},
        **{f"metrics.{name}": value for name, value in sorted(task.metrics.items())},
        **({STEP: task.step} if task.step else {}),
        **({COMMAND: shlex.join(task.command)} if task.command else {}),
    }


def in_order(ids: Sequence[str], values: Mapping[str, Mapping[str, Any]], column: str) -> list[str]:
    """Sort requests by a column: numbers first, then texts, then those without a value.  With "-"
    before its name the largest comes first.
    """
    name, down = column.removeprefix("-"), column.startswith("-")
    having = [id for id in ids if name in values[id]]
    numbers = [id for id in having if _is_number(values[id][name])]
    texts = [id for id in having if not _is_number(values[id][name])]
    return [
        *sorted(numbers, key=lambda id: values[id][name], reverse=down),
        *sorted(texts, key=lambda id: str(values[id][name]), reverse=down),
        *(id for id in ids if name not in values[id]),
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
