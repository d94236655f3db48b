"""Reports what tasks may reach over the network, and what they used of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import BigInteger, func, or_, select
from sqlalchemy.orm import Session

from app.core.model.provisions.network_policy import FIGURES
from app.db.models import Placement, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkUse:
    """Holds what a task may reach, and its figures over all epochs and devices."""

    allow: list[str]
    connections: int = 0
    refused: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def network_use(session: Session, tasks: Sequence[Task]) -> dict[str, NetworkUse]:
    """Return what each task that may reach the network used of it."""
    wishes = {task.id: wish["allow"] for task in tasks if (wish := task.descriptor.get("network"))}
    if not wishes:
        return {}
    sums = (func.sum(Placement.network[name].astext.cast(BigInteger)) for name in FIGURES)
    whose = func.coalesce(Task.gang_id, Task.id)  # the placement of a ticket has ranks of its gang
    query = select(whose, *sums).join(Task, Task.id == Placement.task_id)
    query = query.where(or_(Task.id.in_(wishes), Task.gang_id.in_(wishes)))
    rows = session.execute(query.group_by(whose)).all()
    used = {id: [int(each or 0) for each in figures] for id, *figures in rows}
    nothing = [0] * len(FIGURES)
    return {
        id: NetworkUse(allow=allow, **dict(zip(FIGURES, used.get(id, nothing), strict=True)))
        for id, allow in wishes.items()
    }
