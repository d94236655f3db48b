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
    """

    level: int = 0  # a score that never falls
    # total weight of the children that waited for or held such devices when the level was last
    # measured
    weight: int = 0
    came: int = 0  # total weight of the children that arrived since
    again_s: float = -math.inf  # the level is measured again from this time on


@dataclass(slots=True)
class RoundMemory:
    """Carries from round to round what the next round needs to know."""

    # waiting tasks of the last round for which other tasks were held back
    in_the_way: set[str] = field(default_factory=set)
    # Tasks that went first in the last round -> the tasks that made them first, or kept them from a
    # device (`core.scheduling.record`).
    tried: dict[str, tuple[str, ...]] = field(default_factory=dict)
    goes_on: bool = False  # True: a queue ran out, so the next round continues the last one
    # (`tree.moved`, time): while `moved` is the same, no task gains before that time
    quiet: tuple[int, float] = (-1, -math.inf)
    waits: tuple[GangWait, ...] = ()  # waits of gangs before the last round
    # kinds of which devices were kept for a gang or an urgent task in the last round
    kept: frozenset[str] = frozenset()
    # sizes that changed since the last round began, as they were then
    batches: dict[tuple[str, str], BatchSize] = field(default_factory=dict)
    # functions launched in the last round behind which others may be launched
    leaders: list[str] = field(default_factory=list)
    # service level of each branch and kind; from here on the fields serve idle credit
    services: dict[tuple[Branch, str], Service] = field(default_factory=dict)
    # idle-credit floors that are new since the last plan
    lifted: dict[tuple[str, str, str], IdleCreditFloor] = field(default_factory=dict)
    # (branch, kind) of tasks that left devices by ending since the last admission
    ended: dict[tuple[Branch, str], None] = field(default_factory=dict)
    # queue entries that came since the last plan that is known to be committed
    new: dict[tuple[Branch, str], None] = field(default_factory=dict)
    # queue entries that left since then
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
