"""How long tasks were let stay, read off a replay."""

from __future__ import annotations

from app.core.model.lifecycle import Move
from app.core.simulation.simulator import Report


def stays(report: Report) -> list[tuple[float, float]]:
    """(launched, told to pause) of every stay that ended with a pause."""
    launched: dict[str, float] = {}
    stays = []
    for line in report.timeline:
        if line.decision.move == Move.Launch:
            launched[line.decision.task] = line.at_s
        elif line.decision.move == Move.Pause:
            stays.append((launched[line.decision.task], line.at_s))
    return stays
