"""Computes what a task costs by its dominant resource: devices, or the memory that it reserves
(rule F1).

`tests.oracles.formulas_resources` shows how other systems share several resources at once.
"""

from __future__ import annotations


def dominant_cost(
    cost: int, memory_bytes: int, *, all_cost: int, all_memory_bytes: int
) -> tuple[int, str]:
    """Return a task's cost per second by its dominant resource, and that resource.

    The task holds devices that cost `cost` and reserves `memory_bytes` on them in total. All
    devices of the kind cost `all_cost` and have `all_memory_bytes` (0 if a device does not report
    its memory). Memory that is some part of all memory costs as much as the same part of all
    devices, rounded down. The resource is "devices" or "memory"; if both cost the same, it is
    "devices".

    Slurm calls this MAX_TRES (TRESBillingWeights); Armada's cost of one job is the same figure.
    """
    by_memory = memory_bytes * all_cost // all_memory_bytes if all_memory_bytes else 0
    return (by_memory, "memory") if by_memory > cost else (cost, "devices")
