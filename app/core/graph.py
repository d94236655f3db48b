"""A request's tasks as a graph: is it sound, what needs what, and can it ever run here?

Nodes are tasks.  An edge is a start condition: `after` (order alone) or an input (order and data).
Nothing here knows of time or devices at work; when an edge is met is `core.decide`'s to see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from app.core.descriptor import Descriptor, Fault, TaskDescriptor, near_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One edge into a task: it starts when `task` is done; `port` takes its `output`.

    Both are "" for an edge of `after`.  What comes `late` it need not wait for: a leg of a graph
    may run by then.
    """

    task: str
    port: str = ""
    output: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class Alike:
    """So many `devices` of a host that have as much memory."""

    island: str
    host: str
    memory_bytes: int
    devices: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What a deployment, or an island of it, has of one device kind."""

    alike: tuple[Alike, ...]

    @property
    def memory_bytes(self) -> int:
        """Of the largest device."""
        return max((some.memory_bytes for some in self.alike), default=0)

    def by_island(self, memory_bytes: int) -> Counter[str]:
        """How many have so much, on each island."""
        return self._counted(memory_bytes, lambda some: some.island)

    def together(self, memory_bytes: int) -> int:
        """How many have so much and lie on one host, at most."""
        return max(self._counted(memory_bytes, lambda some: some.host).values(), default=0)

    def _counted(self, memory_bytes: int, by: Callable[[Alike], str]) -> Counter[str]:
        found = Counter[str]()
        for some in self.alike:
            if some.memory_bytes >= memory_bytes:
                found[by(some)] += some.devices
        return found


def needs(descriptor: Descriptor) -> dict[str, tuple[Need, ...]]:
    """The edges into each task, those of `after` first; datablocks are no edges."""
    return {task.name: tuple(need for _, need in _edges(task)) for task in descriptor.tasks}


def order(descriptor: Descriptor) -> tuple[str, ...]:
    """The tasks so that each stands behind what it needs, else as written; cycles are left out."""
    waits = {
        name: {need.task for need in edges if not need.late}
        for name, edges in needs(descriptor).items()
    }
    wanted_by: dict[str, list[str]] = {name: [] for name in waits}
    for name, needed in waits.items():
        for other in needed:
            wanted_by.setdefault(other, []).append(name)
    ready = [name for name in waits if not waits[name]]
    for name in ready:  # grows while it is walked
        for follower in wanted_by[name]:
            waits[follower].discard(name)
            if not waits[follower]:
                ready.append(follower)
    return tuple(ready)


# --- is it sound? -------------------------------------------------------------------------------


def check(descriptor: Descriptor) -> tuple[Fault, ...]:
    """Unknown tasks and outputs, and cycles; empty if the graph is sound."""
    tasks = {task.name: task for task in descriptor.tasks}
    faults = [fault for n, task in enumerate(descriptor.tasks) for fault in _loose(n, task, tasks)]
    return tuple(faults) or tuple(_cycle(descriptor))


def _edges(task: TaskDescriptor) -> Iterator[tuple[str, Need]]:
    """(where it is written below the task, the edge)"""
    for n, name in enumerate(task.start.after):
        yield f"start/after/{n}", Need(task=name)
    late = (task.run.part or {}).get("late", ())
    for port, source in task.inputs.items():
        if source.kind == "task":
            need = Need(task=source.name, port=port, output=source.output, late=port in late)
            yield f"inputs/{port}", need


def _loose(n: int, task: TaskDescriptor, tasks: Mapping[str, TaskDescriptor]) -> Iterator[Fault]:
    """Edges of the n-th task that lead nowhere."""
    for where, need in _edges(task):
        pointer = f"/tasks/{n}/{where}"
        if need.task == task.name:
            yield Fault(pointer, f"{task.name!r} needs itself", "cycle")
        elif need.task not in tasks:
            hint = _hint(need.task, tasks)
            yield Fault(pointer, f"this request has no task {need.task!r}{hint}", "unknown-task")
        elif need.port and need.output not in tasks[need.task].outputs:
            hint = _hint(need.output, tasks[need.task].outputs)
            told = f"task {need.task!r} does not name {need.output!r} in its outputs{hint}"
            yield Fault(pointer, told, "unknown-output")


def _hint(word: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = near_name(word, known)
    return f"; did you mean {near!r}?" if near else ""


def _cycle(descriptor: Descriptor) -> Iterator[Fault]:
    """One cycle by name, if there is any: walk back along needs that never come up in `order`."""
    sound = set(order(descriptor))
    edges = needs(descriptor)
    stuck = [task.name for task in descriptor.tasks if task.name not in sound]
    if not stuck:
        return
    path = [stuck[0]]
    while path[-1] not in path[:-1]:
        waits = (need.task for need in edges[path[-1]] if not need.late)
        path.append(next(task for task in waits if task not in sound))
    ring = path[path.index(path[-1]) :]
    n = next(n for n, task in enumerate(descriptor.tasks) if task.name == ring[0])
    yield Fault(f"/tasks/{n}", f"a cycle of needs: {' needs '.join(ring)}", "cycle")


# --- can it ever run here? ----------------------------------------------------------------------

RANKS_ON_A_DEVICE = 64
PARTING = ("job", "graph")  # what may run on several devices


def unsatisfiable(descriptor: Descriptor, kinds: Mapping[str, Offer]) -> tuple[Fault, ...]:
    """What can never run in a deployment that offers `kinds`, and what is not built yet."""
    return tuple(
        Fault(f"/tasks/{n}/{where}", told, "unsatisfiable")
        for n, task in enumerate(descriptor.tasks)
        for where, told in (*_too_much(task, kinds), *_not_yet(task))
    )


def _too_much(task: TaskDescriptor, kinds: Mapping[str, Offer]) -> Iterator[tuple[str, str]]:
    wanted = task.devices
    offer = kinds.get(wanted.kind)
    if offer is None:
        known = f"there is: {', '.join(sorted(kinds))}" if kinds else "none at all has joined yet"
        yield "devices/kind", f"there is no device of kind {wanted.kind!r} here; {known}"
        return
    if wanted.memory_bytes > offer.memory_bytes:
        told = f"the largest {wanted.kind} device has {offer.memory_bytes} bytes"
        yield "devices/memory_bytes", f"{wanted.memory_bytes} bytes are wanted, {told}"
    else:
        yield from _too_many(task, offer)


def _too_many(task: TaskDescriptor, offer: Offer) -> Iterator[tuple[str, str]]:
    """Of those that are large enough."""
    wanted = task.devices
    devices = offer.by_island(wanted.memory_bytes)
    spans = task.islands if task.run.kind == "job" else 1
    if wanted.min > (most := sum(n for _, n in devices.most_common(spans))):
        where = "here" if len(devices) == 1 else f"on the largest {_islands(spans)}"
        told = f"there are {most} {wanted.kind} devices {where}, {wanted.min} are wanted"
        yield "devices/min", told
    elif wanted.min > (most := offer.together(wanted.memory_bytes)) and not wanted.across_hosts:
        told = f"they are to lie on one host, and none has more than {most}"
        if task.run.kind in PARTING:
            told += "; with `across_hosts: true` they may lie on several"
        yield "devices/min", f"{wanted.min} {wanted.kind} devices are wanted; {told}"


def _islands(n: int) -> str:
    return "island" if n == 1 else f"{n} islands"


def _not_yet(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    if task.devices.across_hosts and task.run.kind not in PARTING:
        told = f"a {task.run.kind} stays on one host; only jobs and graphs may lie on several"
        yield "devices/across_hosts", told
    if task.world_size > RANKS_ON_A_DEVICE:
        yield "world_size", f"{RANKS_ON_A_DEVICE} ranks at most take turns on one device"
    if task.world_size > 1 and task.devices.kind != "cpu":
        yield "world_size", "several ranks take turns on devices of kind 'cpu' only, so far"
    if task.devices.max > 1 and task.run.kind not in PARTING:
        told = (
            "ranks change seats between steps, and only jobs and graphs have steps; leave it at 1"
        )
        yield "devices/max", told
