"""What a board remembers from one scheduling round for the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from app.core.fairness.fair_tree import Branch
from app.core.model.snapshot import BatchSize, BoardTask, GangWait, IdleCreditFloor


@dataclass(slots=True)
class Service:
    """Remembers how well children of a branch are served with one kind of device
    (`core.scheduling.idle_credit`).

    `level` is a score and never falls. `weight` is the total weight of the children that waited for
    or held such devices when the level was last measured. `came` is the total weight of the
    children that arrived since. The level is measured again from `again_s` on.
    """

    level: int = 0
    weight: int = 0
    came: int = 0
    again_s: float = -math.inf


@dataclass(slots=True)
class RoundMemory:
    """Carries from round to round what the next one needs to know.

    `in_the_way` lists waiting tasks of the last round for which other tasks were held back.
    `tried` maps the tasks that went first in the last round to the tasks that made them first or
    kept them from a device (`core.scheduling.record`).  `goes_on` is True if a queue ran out, so
    that the next round continues the last.  `quiet` is (`tree.moved`, time): while `moved` is the
    same, no task gains before that time.  `waits` are the waits of gangs before the last round.
    `batches` are the sizes that changed since it began, as they were then, and `leaders` the
    functions launched in it behind which others may be launched.

    The rest serves idle credit.  `services` has the service level of each branch and kind, and
    `lifted` the floors that are new since the last plan.  `ended` has (branch, kind) of tasks that
    left devices by ending since the last admission.  `new` and `gone` have the queue entries that
    came or went since the last plan that is known to be committed.
    """

    in_the_way: set[str] = field(default_factory=set)
    tried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    goes_on: bool = False
    quiet: tuple[int, float] = (-1, -math.inf)
    waits: tuple[GangWait, ...] = ()
    batches: dict[tuple[str, str], BatchSize] = field(default_factory=dict)
    leaders: list[str] = field(default_factory=list)
    services: dict[tuple[Branch, str], Service] = field(default_factory=dict)
    lifted: dict[tuple[str, str, str], IdleCreditFloor] = field(default_factory=dict)
    ended: dict[tuple[Branch, str], None] = field(default_factory=dict)
    new: dict[tuple[Branch, str], None] = field(default_factory=dict)
    gone: dict[tuple[Branch, str], None] = field(default_factory=dict)

    def looked_at(self, task: BoardTask, *others: BoardTask) -> None:
        """Record that a task went first in this round, and the tasks that led to it or
        blocked it.
        """
        self.tried[task.id] = self.tried.get(task.id, ()) + tuple(other.id for other in others)

    def written_down(self) -> None:
        """Forget which queue entries were new or gone: all decisions so far are committed."""
        self.new.clear()
        self.gone.clear()
