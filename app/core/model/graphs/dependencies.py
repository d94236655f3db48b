"""Treats the tasks of a request as a graph: checks it, orders it, and tells if it can ever run
here.

Nodes are tasks. An edge is a start condition: `after` (order only) or an input (order and data).
This module knows neither the time nor running devices; `core.scheduling.cycle` decides when an edge
is met.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from app.core.model.descriptor import Descriptor, Devices, TaskDescriptor, needs_of
from app.core.model.device_choice import ANY_DEVICE, NO_TRAITS, DeviceChoice, DeviceTraits
from app.core.model.fields import Fault, Hints
from app.core.model.provisions import registry_image
from app.core.model.provisions.best_rule import OF_BEST
from app.core.model.provisions.collectives import EXACT
from app.core.model.provisions.resources import FIELDS, amount, told_of
from app.core.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencyEdge:
    """Describes one edge into a task: the task starts when `task` is done; `port` takes its
    `output`.

    `port` and `output` are "" for an edge of `after`. The task need not wait for an input that may
    come `late`: a partition of a graph may already run when the input arrives.
    """

    task: str
    port: str = ""
    output: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class Alike:
    """Counts devices of one host that have equal memory and traits.

    `hosts` is how many hosts of the island have the same devices as `host`, itself included.
    """

    island: str
    host: str
    memory_bytes: int
    devices: int
    traits: DeviceTraits = NO_TRAITS
    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Offer:
    """Lists the devices of one kind in a deployment, or in one of its islands."""

    alike: tuple[Alike, ...]

    @property
    def memory_bytes(self) -> int:
        """Memory of the largest device, in bytes; 0 if there is none."""
        return max((some.memory_bytes for some in self.alike), default=0)

    def chosen(self, choice: DeviceChoice) -> Offer:
        """Return the offer with only the devices that suit."""
        return Offer(tuple(some for some in self.alike if choice.suits(some.traits)))

    def islands(self, wanted: Devices) -> int:
        """Count the islands that have all the devices that a task needs at the same time."""
        if hosts := wanted.choice.hosts:
            offer, share = self.chosen(wanted.choice), wanted.min // hosts
            able = offer.hosts_with(share, wanted.memory_bytes)
            return sum(n >= hosts for n in able.values())
        found = Counter[tuple[str, str]]()
        for some in self.chosen(wanted.choice).alike:
            if some.memory_bytes >= wanted.memory_bytes:
                if wanted.across_hosts:
                    found[some.island, ""] += some.devices * some.hosts
                else:
                    found[some.island, some.host] += some.devices
        return len({island for (island, _), n in found.items() if n >= wanted.min})

    def by_island(self, memory_bytes: int) -> Counter[str]:
        """Count the devices with at least `memory_bytes`, per island."""
        found = Counter[str]()
        for some in self.alike:
            if some.memory_bytes >= memory_bytes:
                found[some.island] += some.devices * some.hosts
        return found

    def hosts_with(self, share: int, memory_bytes: int) -> Counter[str]:
        """Count the hosts with `share` devices of at least `memory_bytes`, per island."""
        devices, alike = Counter[tuple[str, str]](), dict[tuple[str, str], int]()
        for some in self.alike:
            if some.memory_bytes >= memory_bytes:
                devices[some.island, some.host] += some.devices
                alike[some.island, some.host] = some.hosts
        found = Counter[str]()
        for (island, host), count in devices.items():
            found[island] += alike[island, host] * (count >= share)
        return found

    def together(self, memory_bytes: int) -> int:
        """Return the most devices with at least `memory_bytes` that lie on one host."""
        found = Counter[str]()
        for some in self.alike:
            if some.memory_bytes >= memory_bytes:
                found[some.host] += some.devices
        return max(found.values(), default=0)


def needs(descriptor: Descriptor) -> dict[str, tuple[DependencyEdge, ...]]:
    """Return the edges into each task, those of `after` first.

    Datablocks make no edges.
    """
    return {task.name: tuple(need for _, need in _edges(task)) for task in descriptor.tasks}


def order(descriptor: Descriptor) -> tuple[str, ...]:
    """Return the tasks in an order in which each comes after the tasks that it needs.

    Tasks in cycles are left out. Tasks that may go in any order stay in the order of the
    descriptor.
    """
    waits = {
        name: {need.task for need in edges if not need.late}
        for name, edges in needs(descriptor).items()
    }
    wanted_by: dict[str, list[str]] = {name: [] for name in waits}
    for name, needed in waits.items():
        for other in needed:
            wanted_by.setdefault(other, []).append(name)
    ready = [name for name in waits if not waits[name]]
    for name in ready:  # grows during the iteration
        for follower in wanted_by[name]:
            waits[follower].discard(name)
            if not waits[follower]:
                ready.append(follower)
    return tuple(ready)


# --- soundness ----------------------------------------------------------------------------------


def check(descriptor: Descriptor) -> tuple[Fault, ...]:
    """Report unknown tasks and outputs or, if there are none, a cycle; () if the graph is sound."""
    outputs = {task.name: dict.fromkeys(task.outputs) for task in descriptor.tasks}
    lots = {task.name for task in descriptor.tasks if task.array is not None}
    hints = Hints()
    faults = [
        fault
        for n, task in enumerate(descriptor.tasks)
        for fault in (*_loose(n, task, outputs, hints), *_of_lots(n, task, lots))
    ]
    return tuple(faults) or tuple(_cycle(descriptor))


def _edges(task: TaskDescriptor) -> Iterator[tuple[str, DependencyEdge]]:
    """Yield (pointer below the task, edge)."""
    for n, name in enumerate(task.start.after):
        yield f"start/after/{n}", DependencyEdge(task=name)
    late = (task.run.part or {}).get("late", ())
    for port, source in task.inputs.items():
        if source.kind == "task":
            need = DependencyEdge(
                task=source.name, port=port, output=source.output, late=port in late
            )
            yield f"inputs/{port}", need


def _loose(
    n: int, task: TaskDescriptor, outputs: Mapping[str, Mapping[str, None]], hints: Hints
) -> Iterator[Fault]:
    """Yield faults for edges of the n-th task that name an unknown task or output.

    `outputs` holds the outputs of all tasks by the task's name.
    """
    for where, need in _edges(task):
        pointer = f"/tasks/{n}/{where}"
        if need.task == task.name:
            yield Fault(pointer, f"task {task.name!r} must not need itself", "cycle")
        elif need.task not in outputs:
            hint = hints.hint(need.task, outputs)
            yield Fault(pointer, f"unknown task {need.task!r}{hint}", "unknown-task")
        elif need.port and need.output not in outputs[need.task]:
            hint = hints.hint(need.output, outputs[need.task])
            told = f"task {need.task!r} has no {need.output!r} in its outputs{hint}"
            yield Fault(pointer, told, "unknown-output")


def _of_lots(n: int, task: TaskDescriptor, lots: Collection[str]) -> Iterator[Fault]:
    """Yield faults for inputs that name an output of a lot, of which each member has its own."""
    for where, need in _edges(task):
        if need.port and need.task in lots:
            told = f"{need.task!r} is a lot: each of its members has outputs of its own. Publish"
            told += " them as datablocks, name the lot in start/after, or let another request take"
            told += f" from its best member: REQUEST/{need.task}{OF_BEST}.{need.output}"
            yield Fault(f"/tasks/{n}/{where}", told, "lot")


def _cycle(descriptor: Descriptor) -> Iterator[Fault]:
    """Yield a fault that names one cycle, if there is any.

    It is found by walking back along edges of the tasks that `order` leaves out.
    """
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
    yield Fault(f"/tasks/{n}", f"the tasks form a cycle: {' needs '.join(ring)}", "cycle")


# --- feasibility --------------------------------------------------------------------------------

RANKS_ON_A_DEVICE = 64
MAX_KNOWN = 10  # most models or labels that a fault lists
PARTING = ("job", "graph")  # the kinds that may run on several devices


def unsatisfiable(descriptor: Descriptor, kinds: Mapping[str, Offer]) -> tuple[Fault, ...]:
    """Report tasks that can never run on the offered `kinds`, and features that do not exist
    yet.
    """
    return tuple(
        Fault(f"/tasks/{n}/{where}", told, "unsatisfiable")
        for n, task in enumerate(descriptor.tasks)
        for where, told in (*_too_much(task, kinds), *_not_yet(task))
    )


def _too_much(task: TaskDescriptor, kinds: Mapping[str, Offer]) -> Iterator[tuple[str, str]]:
    wanted = task.devices
    offer = kinds.get(wanted.kind)
    if offer is None:
        known = f"the kinds are {', '.join(sorted(kinds))}" if kinds else "no device has joined yet"
        yield "devices/kind", f"no device of kind {wanted.kind!r}; {known}"
        return
    suitable = offer.chosen(wanted.choice)
    if not suitable.alike and (fault := _choice_fault(task, offer)):
        yield fault
        return
    offer = suitable
    if wanted.memory_bytes > offer.memory_bytes:
        told = f"the largest {wanted.kind} device has {offer.memory_bytes} bytes"
        yield "devices/memory_bytes", f"{wanted.memory_bytes} bytes are requested, but {told}"
    elif _take_turns(task) and not all(some.traits.splice for some in offer.alike):
        told = f"not every device of kind {wanted.kind!r} lets ranks take turns"
        yield "world_size", f"several ranks are requested, but {told}"
    else:
        yield from _too_many(task, offer)


def _take_turns(task: TaskDescriptor) -> bool:
    """True if ranks of the task may share a device."""
    return task.world_size > 1 and task.collectives == EXACT


def _choice_fault(task: TaskDescriptor, offer: Offer) -> tuple[str, str] | None:
    """Return a fault at the first field of the task's device choice for which no device is left."""
    wanted, part = task.devices, ANY_DEVICE
    for name in (field.name for field in fields(DeviceChoice)):
        part = replace(part, **{name: getattr(wanted.choice, name)})
        if not offer.chosen(part).alike:
            if name == "resources":
                return _over_limit(task, offer)
            where = f"devices/{name}" if name != "needs" else _asking(task, offer)
            if where == "image" and (told := _unoffered_registry(task, offer)):
                return where, told
            known = ", ".join(_known_values(offer, name)[:MAX_KNOWN])
            told = f"there is no {wanted.kind} device{part.told}"
            return where, told + (f"; there are {known}" if known else "")
    return None


def _known_values(offer: Offer, name: str) -> list[str]:
    """Return the values of a trait that the devices have.

    `needs` is no trait, so names of mounts are not shown to every tenant.
    """
    found = set[str]()
    for some in offer.alike:
        value = getattr(some.traits, name, ())
        found.update([value] if isinstance(value, str) else value)
    return sorted(found - {""})


def _over_limit(task: TaskDescriptor, offer: Offer) -> tuple[str, str]:
    """Return a fault at the first resource of which no device gives as much; else at the first
    resource.
    """
    wanted, kind = task.devices.choice.resources, task.devices.kind
    for name, asked in wanted:
        most = max(dict(some.traits.gives).get(name, 0) for some in offer.alike)
        if asked > most:
            told = f"{amount(name, asked)} are requested, but no {kind} device gives a task"
            return f"resources/{FIELDS[name]}", f"{told} more than {amount(name, most)}"
    told = f"there is no {kind} device that gives a task {told_of(wanted)} at once"
    return f"resources/{FIELDS[wanted[0][0]]}", told


def _asking(task: TaskDescriptor, offer: Offer) -> str:
    """Return the first field that asks for something that no device offers; else the first field
    that asks.
    """
    asked, offered = needs_of(task), _offered(offer)
    return next(
        (where for need, where in asked.items() if need not in offered), next(iter(asked.values()))
    )


def _unoffered_registry(task: TaskDescriptor, offer: Offer) -> str:
    """Return what is missing if no device offers the registry of the task's image; "" otherwise."""
    image = registry_image.image_of(task.image or "")
    if image is None or image.need in _offered(offer):
        return ""
    return registry_image.unoffered(image, task.devices.kind)


def _offered(offer: Offer) -> set[str]:
    return {each for some in offer.alike for each in some.traits.offers}


def _too_many(task: TaskDescriptor, offer: Offer) -> Iterator[tuple[str, str]]:
    """Yield a fault if not enough devices have the memory that the task needs."""
    wanted = task.devices
    devices = offer.by_island(wanted.memory_bytes)
    spans = task.islands if task.run.kind == "job" else 1
    if wanted.min > (most := sum(n for _, n in devices.most_common(spans))):
        where = "here" if len(devices) == 1 else f"on the largest {_islands(spans)}"
        told = f"{wanted.min} {wanted.kind} devices are requested, but there are {most} {where}"
        yield "devices/min", told
    elif hosts := wanted.choice.hosts:
        share = wanted.min // hosts
        able = offer.hosts_with(share, wanted.memory_bytes)
        if hosts > (most := max(able.values(), default=0)):
            each = counted(share, f"{wanted.kind} device")
            where = "here" if len(devices) == 1 else "on the island with the most"
            told = f"{hosts} hosts with {each} each are requested, but {most} {where} "
            told += "has as many" if most == 1 else "have as many"
            told += "; set another number of hosts, or set `across_hosts: true` instead to use any"
            yield "devices/hosts", told
    elif wanted.min > (most := offer.together(wanted.memory_bytes)) and not wanted.across_hosts:
        told = f"no single host has more than {most}"
        if task.run.kind in PARTING:
            told += "; set `across_hosts: true` to use several hosts"
        yield "devices/min", f"{wanted.min} {wanted.kind} devices are requested on one host; {told}"


def _islands(n: int) -> str:
    return "island" if n == 1 else f"{n} islands"


def _not_yet(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    if task.devices.across_hosts and task.run.kind not in PARTING:
        told = (
            f"a {task.run.kind} must stay on one host; only jobs and graphs can use several hosts"
        )
        yield "devices/hosts" if task.devices.choice.hosts else "devices/across_hosts", told
    elif task.devices.choice.hosts and task.run.kind != "job":
        told = (
            f"must be 1 for a {task.run.kind}: only the ranks of a job are as many on each host; "
            "leave it out, and set `across_hosts: true` to use any hosts"
        )
        yield "devices/hosts", told
    if task.world_size > RANKS_ON_A_DEVICE:
        yield "world_size", f"at most {RANKS_ON_A_DEVICE} ranks can share one device"
    if task.run.kind == "command":
        yield from _of_command(task)
    if task.devices.max > 1 and task.run.kind not in (*PARTING, "command"):
        yield "devices/max", f"must be 1: a {task.run.kind} uses one device"


def _of_command(task: TaskDescriptor) -> Iterator[tuple[str, str]]:
    """Yield a fault if the command's ranks cannot have these devices.

    Its devices cannot change: its processes have no safe point at which they could be told.
    """
    devices, ranks = task.devices, task.world_size
    if devices.kind != "cpu" and ranks not in (1, devices.min):
        told = (
            f"must be {ranks}: each of the {ranks} ranks needs a {devices.kind} device of its own"
        )
        yield "devices/min", told
    elif devices.max > devices.min:
        told = (
            f"must be {devices.min}, as min is: a command keeps the devices that it began with. "
            f"For {devices.max} devices set min to {devices.max}"
        )
        yield "devices/max", told
