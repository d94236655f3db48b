"""Distinguishes heartbeats that need a round at once from heartbeats that say nothing new.

Most heartbeats repeat what the island knows, with later times, more steps and other temperatures.
They only renew a lease, which lasts for several heartbeats. So they can wait a moment, until a
round takes many of them: most of the cost of a round does not depend on how many heartbeats it
takes.
"""

from __future__ import annotations

from typing import Any

from app.core.model.protocol.messages import Alive, ResidentView


class HeartbeatNews:
    """Remembers each device's last heartbeat, without the fields that change in every heartbeat."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Any, ...]] = {}

    def is_new(self, alive: Alive) -> bool:
        """True if the heartbeat says more than that its device is alive and continues."""
        said = (
            alive.incarnation,
            alive.facts,
            [_standing(view) for view in alive.residents],
            alive.ahead,
            alive.links,
            alive.hung,
            alive.health.get("findings"),
        )
        is_new = self._said.get(alive.device) != said
        self._said[alive.device] = said
        return is_new or bool(alive.events or alive.logs)


def _standing(view: ResidentView) -> tuple[Any, ...]:
    progress = (view.state, view.order_seq, view.level, view.lacks, view.waits_for)
    return (view.task, view.epoch, *progress, view.behind)
