"""Adds to the report of a failed test what happened to its tasks on the machines that it used.

A machine is that of a device, also of a `DeviceRig`, or an island's board: each keeps a `Story`.
"""

from __future__ import annotations

import re
from collections import deque

import pytest

from app.core.model.story import Story

MACHINES = 8  # most machines of a test that are remembered: Hypothesis makes thousands
LINES = 60  # most lines for each task, the last ones

_made = deque[Story](maxlen=MACHINES)
_init = Story.__init__


def _remember(story: Story) -> None:
    _init(story)
    _made.append(story)


def watch() -> None:
    """Remember every story that is begun in this process from now on."""
    Story.__init__ = _remember  # type: ignore[method-assign]


def forget() -> None:
    _made.clear()


def add_to(report: pytest.TestReport) -> None:
    """Add the stories of the tasks that the failure names, or of all tasks if it names none."""
    if not report.failed:
        return
    failure = report.longreprtext
    told = dict.fromkeys(task for story in _made for task in story.tasks())
    named = [task for task in told if re.search(f"[\"']{re.escape(task)}[\"']", failure)]
    for number, story in enumerate(_made, start=1):
        lines = [line for task in named or told for line in story.of(task)[-LINES:]]
        if lines:
            report.sections.append((f"Story of machine {number} of {len(_made)}", "\n".join(lines)))
