"""Decides when a task has stalled: it holds a device, and makes no progress.

Progress is a new step, a new line of the log, or a new row of metrics. Only the time counts for
which the task held a device, so a task that is paused, or waits, does not stall.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class SignsOfProgress:
    """Names a task's newest step, line and row of metrics; each number is 0 if there is none."""

    step: int = 0
    line: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProgress:
    """Holds the progress that was seen last.

    `held_us` is how long the task had held a device when this was seen first. `is_told`: the stall
    that followed was told.
    """

    progress: SignsOfProgress
    held_us: int
    is_told: bool = False


def judge_progress(
    before: SeenProgress | None, progress: SignsOfProgress, *, held_us: int, stalled_us: int
) -> tuple[SeenProgress, bool]:
    """Return what is to be kept, and whether the task has stalled and is to be told now.

    A stall is told once; the next one is told only after the task went on.
    """
    if before is None or before.progress != progress:
        return SeenProgress(progress=progress, held_us=held_us), False
    if before.is_told or held_us - before.held_us < stalled_us:
        return before, False
    return replace(before, is_told=True), True
