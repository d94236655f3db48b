"""Read task logs and the ledger, and judge if a promise was broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A step as reported by the process that ran it; nanoseconds of the host's monotonic clock."""

    process: int
    step: int
    began_ns: int
    ended_ns: int | None


def runs(lines: Iterable[str]) -> list[Run]:
    """Pair the "begin" and "end" lines of tests/acceptance/jobs/train.py, by process and step."""
    open_: dict[tuple[int, int], int] = {}
    found = []
    for line in lines:
        match line.split():
            case ["begin", at, process, step]:
                open_[int(process), int(step)] = int(at)
            case ["end", at, process, step] if (int(process), int(step)) in open_:
                who = int(process), int(step)
                began = open_.pop(who)
                found.append(Run(process=who[0], step=who[1], began_ns=began, ended_ns=int(at)))
    for (process, step), began in open_.items():
        found.append(Run(process=process, step=step, began_ns=began, ended_ns=None))
    return sorted(found, key=lambda run: run.began_ns)


def overlaps(found: list[Run]) -> list[tuple[Run, Run]]:
    """Return pairs of steps of one task that two processes ran at once."""
    pairs = []
    for before, after in pairwise(found):
        ended = before.ended_ns if before.ended_ns is not None else before.began_ns
        if before.process != after.process and after.began_ns < ended:
            pairs.append((before, after))
    return pairs
