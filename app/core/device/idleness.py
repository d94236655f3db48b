"""Decides when a task that computes nothing is warned, and when it is paused.

A tenant says how long its tasks may hold a device without computing. After half of that time the
task is warned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class IdleStep(StrEnum):
    """Names what the island does about a task that computes nothing."""

    WARN = "warned"
    PAUSE = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idleness:
    """The launch of a task that has computed nothing since `since_s`."""

    task: str
    epoch: int
    since_s: float
    is_warned: bool = False


def judge_idleness(
    before: Idleness | None, *, task: str, epoch: int, now_s: float, pause_s: float
) -> tuple[Idleness, IdleStep | None]:
    """Judge a task whose device is idle now. If it is another task or launch than before, start
    counting anew.
    """
    if before is None or (before.task, before.epoch) != (task, epoch):
        return Idleness(task=task, epoch=epoch, since_s=now_s), None
    idle_s = now_s - before.since_s
    if idle_s >= pause_s:
        return before, IdleStep.PAUSE
    if idle_s >= pause_s / 2 and not before.is_warned:
        return replace(before, is_warned=True), IdleStep.WARN
    return before, None
