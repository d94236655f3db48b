"""How the metrics of a new task's first steps are kept."""

from __future__ import annotations

from workers.residents import progress


def test_first_points_are_evenly_thinned():
    points = progress.FirstPoints(until_s=1.0)
    for step in range(1, 1001):
        points.add(step, {"loss": 1 / step})
    steps = [step for step, _ in points.kept]
    assert progress.FIRST_POINTS / 2 <= len(steps) <= progress.FIRST_POINTS
    assert steps == list(range(1, 1001, points.stride))
