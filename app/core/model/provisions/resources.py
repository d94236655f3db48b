"""Says what a task may take of its host: processors, memory, disk and processes.

A task runs only on a host that enforces each limit of the task. A host reports which limits it
enforces (`offer_of`) and how much it can give one task (the fact GIVES). A limit is no reservation:
if all tasks of a host want processors, these are divided by weight.

Numbers are whole: processors in thousandths, all else in bytes or pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.core.model.fields import Fields
from app.core.units import size

JSON = dict[str, Any]

# name of the fact of a device that holds: resource -> the most that one task can get
GIVES = "gives"
CPUS, MEMORY, DISK, PROCESSES = "cpus", "memory", "disk", "processes"
#: resource -> its field in `resources`
FIELDS = {
    CPUS: "cpus",
    MEMORY: "memory_bytes",
    DISK: "disk_bytes",
    PROCESSES: "processes",
}
LEAST_BYTES = 64 * 2**20
MOST_BYTES = 2**50
MOST_CPUS = 4096
MOST_PROCESSES = 1000  # the limit of a task that asks for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Lists the limits of one task.

    0 asks for no limit; then only the limits of the device hold.
    """

    cpus_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    processes: int = 0

    def asked(self) -> Iterator[tuple[str, int]]:
        """Yield each resource that is limited, with its limit."""
        said = {
            CPUS: self.cpus_milli,
            DISK: self.disk_bytes,
            MEMORY: self.memory_bytes,
            PROCESSES: self.processes,
        }
        yield from ((name, most) for name, most in said.items() if most)

    def as_json(self) -> JSON:
        said = {
            "cpus": self.cpus_milli / 1000,
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "processes": self.processes,
        }
        return {name: value for name, value in said.items() if value}


NO_RESOURCES = Resources()


def of_amounts(amounts: Mapping[str, int]) -> Resources:
    """Return amounts by name as `Resources`, the form of the descriptor's field."""
    return Resources(
        cpus_milli=amounts.get(CPUS, 0),
        memory_bytes=amounts.get(MEMORY, 0),
        disk_bytes=amounts.get(DISK, 0),
        processes=amounts.get(PROCESSES, 0),
    )


def read_resources(fields: Fields) -> Resources:
    """Read the field `resources`."""
    if not fields.given:
        return NO_RESOURCES
    bounds: dict[str, Any] = {"least": LEAST_BYTES, "most": MOST_BYTES}
    cpus = fields.number("cpus", 0.0, above=0.0, most=MOST_CPUS)
    if 0 < cpus < 0.1:
        fields.fault("cpus", f"must be at least 0.1; got {cpus:g}", "range")
    resources = Resources(
        cpus_milli=round(1000 * cpus),
        memory_bytes=fields.integer("memory_bytes", 0, **bounds),
        disk_bytes=fields.integer("disk_bytes", 0, **bounds),
        processes=fields.integer("processes", 0, least=1, most=MOST_PROCESSES),
    )
    fields.close()
    return resources


def offer_of(resource: str) -> str:
    """Return the offer of a device that enforces the limit of this resource."""
    return f"limit:{resource}"


def lacking(asked: tuple[tuple[str, int], ...], gives: Mapping[str, int]) -> Iterator[str]:
    """Yield the resources that exceed what the device can give."""
    yield from (name for name, most in asked if most > gives.get(name, 0))


def amount(resource: str, value: int) -> str:
    """Return an amount in words: "1.5 processors", "4.0 GiB of host memory"."""
    match resource:
        case "cpus":
            return f"{value / 1000:g} processors"
        case "memory":
            return f"{size(value)} of host memory"
        case "disk":
            return f"{size(value)} of disk"
        case _:
            return f"{value} processes"


def told_of(asked: tuple[tuple[str, int], ...]) -> str:
    """Return what is asked in words; "" for nothing."""
    return " and ".join(amount(name, most) for name, most in asked)


def exceeded(resource: str, used: int, most: int) -> str:
    """Return the sentence for a task that reached its own limit, with its peak."""
    match resource:
        case "processes":
            told = f"It reached {most} processes and threads"
        case _:
            _, _, what = amount(resource, most).partition(" of ")
            told = f"It used {size(used)} of {size(most)} of {what}"
    return f"{told} (its limit, resources.{FIELDS[resource]})."
