"""What the process of a task does before its code runs."""

from __future__ import annotations

import sys

from workers.residents import executor


def own():
    return [name for name in sys.modules if name.partition(".")[0] in ("app", "workers")]


def test_a_fork_finds_all_our_modules_among_the_last(monkeypatch):
    before = own()
    executor.put_own_modules_last()
    assert list(sys.modules)[-len(before) :] == before
    monkeypatch.setitem(sys.modules, "workers.imported_later", sys)
    monkeypatch.setitem(sys.modules, "worker", sys)  # is called like ours, and is not
    assert executor._own_modules() == ["workers.imported_later", *reversed(before)]


def test_first_points_are_evenly_thinned():
    points = executor.FirstPoints(until_s=1.0)
    for step in range(1, 1001):
        points.add(step, {"loss": 1 / step})
    steps = [step for step, _ in points.kept]
    assert executor.FIRST_POINTS / 2 <= len(steps) <= executor.FIRST_POINTS
    assert steps == list(range(1, 1001, points.stride))
