"""Suggests what to request for the next task, from the peaks of a similar task that has ended."""

from __future__ import annotations

from collections.abc import Mapping

from app.core.model.lifecycle import State
from app.core.model.provisions.resources import (
    CPUS,
    LEAST_BYTES,
    MOST_PROCESSES,
    PROCESSES,
    Resources,
    of_amounts,
)

UNIT_BYTES = 64 * 2**20
SPARE = 8  # an eighth of the peak: heartbeats do not see every moment


def memory_to_request(state: str, peak_bytes: int) -> int | None:
    """Return how much memory to request after this peak, in whole units.

    Returns None if the task is not done, as it may still need more, or if nothing was measured.
    """
    if state != State.done or peak_bytes <= 0:
        return None
    asked = peak_bytes + peak_bytes // SPARE
    return -(-asked // UNIT_BYTES) * UNIT_BYTES


UNITS = {CPUS: 500, PROCESSES: 8}  # half a processor; the unit of memory and disk is UNIT_BYTES


def resources_to_request(state: str, peaks: Mapping[str, int]) -> Resources | None:
    """Return the limits to request after these peaks of host resources; an eighth is added as a
    reserve.

    Returns None if the task is not done, or if nothing was measured.
    """
    if state != State.done or not peaks:
        return None
    asked = {name: _in_units(name, peak + peak // SPARE) for name, peak in peaks.items() if peak}
    return of_amounts(asked)


def _in_units(name: str, wanted: int) -> int:
    unit = UNITS.get(name, UNIT_BYTES)
    rounded = -(-wanted // unit) * unit
    if name == PROCESSES:
        return min(rounded, MOST_PROCESSES)
    return rounded if name == CPUS else max(rounded, LEAST_BYTES)
