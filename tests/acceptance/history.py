"""Reads what tasks said and what the ledger says, and judges whether a promise was broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One step as a process saw it; times in nanoseconds of the host's monotonic clock."""

    pid: int
    step: int
    began_ns: int
    ended_ns: int | None


def runs(lines: Iterable[str]) -> list[Run]:
    """Pair the "begin" and "end" lines of tests/acceptance/jobs/train.py, by process and step."""
    open_: dict[tuple[int, int], int] = {}
    found = []
    for line in lines:
        match line.split():
            case ["begin", at, pid, step]:
                open_[int(pid), int(step)] = int(at)
            case ["end", at, pid, step] if (int(pid), int(step)) in open_:
                began = open_.pop((int(pid), int(step)))
                found.append(Run(pid=int(pid), step=int(step), began_ns=began, ended_ns=int(at)))
    for (pid, step), began in open_.items():
        found.append(Run(pid=pid, step=step, began_ns=began, ended_ns=None))
    return sorted(found, key=lambda run: run.began_ns)


def overlaps(found: list[Run]) -> list[tuple[Run, Run]]:
    """Pairs of steps of one task that two processes ran at once."""
    pairs = []
    for before, after in pairwise(found):
        ended = before.ended_ns if before.ended_ns is not None else before.began_ns
        if before.pid != after.pid and after.began_ns < ended:
            pairs.append((before, after))
    return pairs
