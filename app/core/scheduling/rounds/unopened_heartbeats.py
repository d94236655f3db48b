"""Keeps heartbeats that are not opened yet, so that only the newest of a device is.

To check and parse a heartbeat is a large part of what it costs.  An island that is behind finds
several heartbeats of each device in its queue, and the newest has all that earlier ones had.  So an
island with too many devices answers each of them less often, and does not fall behind further.

A heartbeat may be forged.  So an older one is dropped only once a newer one was accepted: a forger
costs the island time, and takes no heartbeat away.
"""

from __future__ import annotations

from collections.abc import Iterator


class UnopenedHeartbeats:
    """Holds sealed heartbeats by the device process that each claims to come from."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[str]] = {}

    def put(self, process: str, sealed: str) -> None:
        self._waiting.setdefault(process, []).append(sealed)

    def take(self) -> Iterator[Iterator[str]]:
        """Remove and return the heartbeats of each process, the newest first.

        The processes are in the order in which their first heartbeats came.
        """
        waiting, self._waiting = self._waiting, {}
        return (reversed(texts) for texts in waiting.values())
