"""Checks, flattens and orders a task that is a graph: small functions joined by blocks.

`parse` reads the JSON of `run.graph` and reports every fault at its JSON Pointer. It dissolves
sub-graphs: their nodes are in the outer graph as "SUB/NODE". `check` reports blocks that do not fit
their ports. `program` is what a resident runs: the nodes in one order, blocks by number, and the
blocks that can be freed after each node.

A node is a function of the bundle. It reads blocks by its input ports and writes one block for each
name in `outputs`. Blocks are immutable. A port named in `inout` is read and written, and may take
over the memory of the block that it reads. A node with `map` runs as one shard for each item of the
lists that it maps over, and each of its output blocks is a list. So the number of shards need not
be known here.

This module knows no requests, tenants or devices, and runs nothing.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from app.core.model.descriptor import ENTRY, BadDescriptor, TaskDescriptor
from app.core.model.fields import (
    MAX_COMPARED,
    NAME,
    NAME_RULE,
    WORD,
    WORD_RULE,
    Fault,
    Fields,
    Hints,
    escaped,
    not_plain,
    shortened,
)

JSON = dict[str, Any]

MAX_NODES = 10_000  # in all sub-graphs together
MAX_LISTED = 10_000  # most blocks in a list that one port takes
MAX_EST_MS = 1e9
MAX_RANK = 64  # dimensions of a shape
MAX_BYTES = 2**50
USUAL_BYTES = 1 << 20  # bytes assumed for a block of unknown size
SIZED_LIMIT = 1000  # most blocks whose measured sizes are kept after a run
INPUT = "input:"

#: dtype, as torch names it -> bytes of an element
DTYPES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}

_ENTRY_RULE = 'of the form "module:name"'
RESERVED = frozenset({"ctx"})  # arguments that a function gets in addition to its ports


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTensor:
    """Declares a block; a size is a number, or a name that stands for one number."""

    dtype: str
    shape: tuple[int | str, ...]

    @property
    def bytes(self) -> int | None:
        """The size in bytes; None if a dimension is only named."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        return prod(sizes) * DTYPES[self.dtype] if len(sizes) == len(self.shape) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Says what a port takes: the block of one source, or a list of blocks.

    A source is "NODE.OUTPUT", or "input:PORT" for an input of the task.
    """

    sources: tuple[str, ...]
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Describes one function of the graph. `where` is its JSON Pointer, for faults.

    `tensors` are the declarations of its input and output ports; for a mapped node, those of one
    shard. `memory_bytes` is what the function takes while it runs, not counting its blocks.
    `draws`: the function may draw random numbers, and so gets its own seed.
    """

    name: str
    function: str
    inputs: Mapping[str, Binding] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    inout: tuple[str, ...] = ()
    map: tuple[str, ...] = ()
    tensors: Mapping[str, DeclaredTensor] = field(default_factory=dict)
    est_ms: float = 0.0
    memory_bytes: int = 0
    draws: bool = True
    where: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The blocks that the node reads, each once."""
        return tuple(dict.fromkeys(s for taken in self.inputs.values() for s in taken.sources))

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{output}" for output in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Describes a flat graph: `outputs` maps its outputs to blocks; `inputs` are declarations of
    its inputs.

    `memory_bytes` limits what all blocks take on the device at once; 0 means no limit but the
    device's. `made_bytes` are block sizes that an earlier run measured; users never write them.
    """

    nodes: tuple[Node, ...]
    outputs: Mapping[str, str]
    inputs: Mapping[str, DeclaredTensor] = field(default_factory=dict)
    memory_bytes: int = 0
    made_bytes: Mapping[str, int] = field(default_factory=dict)
    where: str = ""

    @property
    def ports(self) -> tuple[str, ...]:
        """The names of the inputs that nodes read."""
        read = (block for node in self.nodes for block in node.reads)
        return tuple(dict.fromkeys(b.removeprefix(INPUT) for b in read if b.startswith(INPUT)))


# --- from JSON ----------------------------------------------------------------------------------


def parse(body: object, pointer: str = "") -> TaskGraph:
    """Read a graph; raises BadDescriptor with all its faults, at pointers below `pointer`."""
    faults = [replace(fault, pointer=pointer + fault.pointer) for fault in not_plain(body)]
    if faults:
        raise BadDescriptor(shortened(faults))
    fields = Fields(body, pointer, faults)
    limits = fields.inside("limits")
    memory_bytes = limits.integer("memory_bytes", 0, least=0, most=MAX_BYTES)
    limits.close()
    found = replace(_graph(fields), memory_bytes=memory_bytes)
    if len(found.nodes) > MAX_NODES:
        fields.fault(
            "nodes", f"must have at most {MAX_NODES} nodes; got {len(found.nodes)}", "range"
        )
    faults += check(found) if not faults else ()
    if faults:
        raise BadDescriptor(shortened(faults))
    return found


def _graph(fields: Fields) -> TaskGraph:
    """Return the graph, with the nodes of sub-graphs in place of the sub-graphs.

    Each node is checked by itself; edges between nodes are not checked here.
    """
    nodes, made, seen = list[Node](), dict[str, str](), set[str]()
    for where, body in fields.items("nodes", least=1, most=MAX_NODES):
        inside = Fields(body, where, fields.faults)
        name = inside.text("name", "", NAME, NAME_RULE)
        inside.require("name")
        if name in seen:
            inside.fault("name", f"the node name {name!r} is used twice", "twice")
        seen.add(name or where)
        if inside.body.get("graph") is not None:
            nodes += _sub_graph(inside, name, made)
        else:
            nodes.append(_node(inside, name))
    graph = TaskGraph(
        nodes=tuple(_rebound(node, made) for node in nodes),
        outputs={port: made.get(block, block) for port, block in _outputs(fields).items()},
        inputs=_tensors(fields, "tensors"),
        where=fields.pointer,
    )
    fields.close()
    return graph


def _node(fields: Fields, name: str) -> Node:
    fields.require("function")
    est = fields.inside("est")
    node = Node(
        name=name,
        function=fields.text("function", "", ENTRY, _ENTRY_RULE),
        inputs=_inputs(fields),
        outputs=fields.texts("outputs", WORD, WORD_RULE),
        params=_params(fields),
        inout=fields.texts("inout", WORD, WORD_RULE),
        map=_mapped(fields),
        tensors=_tensors(fields, "tensors"),
        est_ms=est.number("ms", 0.0, above=0, most=MAX_EST_MS),
        memory_bytes=est.integer("memory_bytes", 0, least=0, most=MAX_BYTES),
        draws=fields.flag("draws", True),
        where=fields.pointer,
    )
    est.close()
    fields.close()
    _check_ports(fields, node)
    return node


def _check_ports(fields: Fields, node: Node) -> None:
    """Report the faults that show in one node alone."""
    outputs = frozenset(node.outputs)
    for port in node.map:
        if port not in node.inputs:
            fields.fault("map", f"{port!r} in map is not an input of this node", "unbound")
    for port in node.tensors:
        if port not in node.inputs and port not in outputs:
            fields.fault(f"tensors/{port}", f"{port!r} is not a port of this node", "unbound")
    for n, port in enumerate(node.inout):
        if port not in node.inputs or port not in outputs:
            told = f"the inout port {port!r} must be in both inputs and outputs"
            fields.fault(f"inout/{n}", told, "unbound")
        elif node.inputs[port].is_list:
            fields.fault(
                f"inout/{n}", f"the inout port {port!r} must have a single block; got several"
            )
    for word in {*node.params} & {*node.inputs, *RESERVED}:
        fields.fault(
            f"params/{word}",
            f"the name {word!r} is already used by another argument of the function",
            "twice",
        )
    for word in {*node.inputs} & RESERVED:
        fields.fault(
            f"inputs/{word}", f"the name {word!r} is reserved: every function gets it", "twice"
        )


def _inputs(fields: Fields) -> dict[str, Binding]:
    found = {}
    for port, said in fields.mapping("inputs").items():
        where = f"inputs/{escaped(port)}"
        if not WORD.fullmatch(port):
            fields.fault(where, f"the name of an input must be {WORD_RULE}")
        listed = said if isinstance(said, list) else [said]
        wrong = [n for n, one in enumerate(listed) if not _is_source(one)]
        for n in wrong:
            told = 'must be "NODE.OUTPUT", or "input:PORT" for an input of the task'
            fields.fault(f"{where}/{n}" if listed is said else where, told)
        if len(listed) > MAX_LISTED:
            fields.fault(
                where, f"must have at most {MAX_LISTED} blocks; got {len(listed)}", "range"
            )
        if not wrong:
            found[port] = Binding(sources=tuple(listed), is_list=listed is said)
    return found


def _is_source(said: object) -> bool:
    if not isinstance(said, str):
        return False
    if said.startswith(INPUT):
        return bool(WORD.fullmatch(said.removeprefix(INPUT)))
    name, _, output = said.rpartition(".")
    return bool(NAME.fullmatch(name) and WORD.fullmatch(output))


def _outputs(fields: Fields) -> dict[str, str]:
    found = {}
    fields.require("outputs")
    for port, said in fields.mapping("outputs").items():
        where = f"outputs/{escaped(port)}"
        if not WORD.fullmatch(port):
            fields.fault(where, f"the name of an output must be {WORD_RULE}")
        if not _is_source(said) or said.startswith(INPUT):
            fields.fault(where, 'must be "NODE.OUTPUT"')
        else:
            found[port] = said
    return found


def _params(fields: Fields) -> JSON:
    params = fields.mapping("params")
    for name in params:
        if not WORD.fullmatch(name):
            fields.fault(f"params/{escaped(name)}", f"the name of a parameter must be {WORD_RULE}")
    return params


def _mapped(fields: Fields) -> tuple[str, ...]:
    """Return the mapped ports, one or several.

    The lists of several ports are iterated together.
    """
    if isinstance(fields.body.get("map"), str):
        return (fields.text("map", "", WORD, WORD_RULE),)
    return fields.texts("map", WORD, WORD_RULE)


def _tensors(fields: Fields, key: str) -> dict[str, DeclaredTensor]:
    found = {}
    inside = fields.inside(key)
    for port in inside.body:
        one = inside.inside(port)
        one.require("dtype")
        dtype = one.one_of("dtype", tuple(DTYPES), "")
        shape = tuple(_size(one, *said) for said in one.items("shape", least=0, most=MAX_RANK))
        one.close()
        if dtype:
            found[port] = DeclaredTensor(dtype=dtype, shape=shape)
    return found


def _size(fields: Fields, pointer: str, said: object) -> int | str:
    if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= MAX_BYTES:
        return said
    if isinstance(said, str) and WORD.fullmatch(said):
        return said
    told = f"must be a whole number of at least 0, or a name for a size: {WORD_RULE}"
    fields.faults.append(Fault(pointer, told))
    return 0


# --- sub-graphs ---------------------------------------------------------------------------------


def _sub_graph(fields: Fields, name: str, made: dict[str, str]) -> Iterator[Node]:
    """Yield the nodes of a sub-graph; `made` maps its outputs "NAME.PORT" to their blocks."""
    given = _inputs(fields)
    inner = _graph(fields.inside("graph"))
    fields.close()
    ports, hints = dict.fromkeys(inner.ports), Hints()
    for port in ports:
        if port not in given:
            fields.fault(
                "inputs", f"the nested graph reads {port!r}, which is missing here", "unbound"
            )
    for port in given:
        if port not in ports:
            told = f"the nested graph does not read {port!r}{hints.hint(port, ports)}"
            fields.fault(f"inputs/{port}", told, "unbound")
    made.update({f"{name}.{port}": f"{name}/{block}" for port, block in inner.outputs.items()})
    for node in inner.nodes:
        tensors = {**_declared_outside(node, inner.inputs), **node.tensors}
        yield replace(
            node,
            name=f"{name}/{node.name}",
            inputs={p: _lifted(taken, name, given) for p, taken in node.inputs.items()},
            tensors={p: _scoped(tensor, name) for p, tensor in tensors.items()},
        )


def _declared_outside(
    node: Node, inputs: Mapping[str, DeclaredTensor]
) -> dict[str, DeclaredTensor]:
    """Return the sub-graph's declarations of the inputs that a node reads whole."""
    whole = {p: taken.sources[0] for p, taken in node.inputs.items() if not taken.is_list}
    mapped = frozenset(node.map)
    ports = {p: block.removeprefix(INPUT) for p, block in whole.items() if p not in mapped}
    return {port: inputs[name] for port, name in ports.items() if name in inputs}


def _lifted(taken: Binding, name: str, given: Mapping[str, Binding]) -> Binding:
    """Return what an inner port reads, in terms of the outer graph."""
    if not taken.is_list and taken.sources[0].startswith(INPUT):
        return given.get(taken.sources[0].removeprefix(INPUT), taken)
    sources = list[str]()
    for source in taken.sources:
        # an input inside a list: a list given for it is merged into this list
        if source.startswith(INPUT):
            sources += given.get(source.removeprefix(INPUT), Binding(sources=(source,))).sources
        else:
            sources.append(f"{name}/{source}")
    return Binding(sources=tuple(sources), is_list=taken.is_list)


def _scoped(tensor: DeclaredTensor, name: str) -> DeclaredTensor:
    shape = (size if isinstance(size, int) else f"{name}/{size}" for size in tensor.shape)
    return replace(tensor, shape=tuple(shape))


def _rebound(node: Node, made: Mapping[str, str]) -> Node:
    """Replace the names of sub-graph outputs by the names of the blocks behind them."""
    inputs = {
        port: replace(taken, sources=tuple(made.get(s, s) for s in taken.sources))
        for port, taken in node.inputs.items()
    }
    return replace(node, inputs=inputs)


# --- its name -----------------------------------------------------------------------------------


def canonical(body: JSON) -> bytes:
    """Return the bytes whose SHA-256 names a graph: JSON with sorted keys, no spaces, in UTF-8."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


# --- soundness ----------------------------------------------------------------------------------


def check(graph: TaskGraph) -> tuple[Fault, ...]:
    """Report unknown blocks, a cycle, and declarations that do not fit; () if the graph is
    sound.
    """
    made = {block for node in graph.nodes for block in node.writes}
    faults = [*_unbound(graph, made)]
    if faults:
        return tuple(faults)
    return tuple(_cycle(graph)) or tuple(_misfits(graph))


def _unbound(graph: TaskGraph, made: set[str]) -> Iterator[Fault]:
    hints, known = Hints(), heapq.nsmallest(MAX_COMPARED, made)
    for node in graph.nodes:
        for port, taken in node.inputs.items():
            for block in taken.sources:
                if not block.startswith(INPUT) and block not in made:
                    told = f"no node produces {block!r}{hints.hint(block, known)}"
                    yield Fault(f"{node.where}/inputs/{port}", told, "unbound")
    for port, block in graph.outputs.items():
        if block not in made:
            told = f"no node produces {block!r}{hints.hint(block, known)}"
            yield Fault(f"{graph.where}/outputs/{port}", told, "unbound")
    ports = set(graph.ports)
    for port in graph.inputs:
        if port not in ports:
            told = f"no node reads the input {port!r}"
            yield Fault(f"{graph.where}/tensors/{port}", told, "unbound")


def _cycle(graph: TaskGraph) -> Iterator[Fault]:
    """Yield a fault that names one cycle, if there is any."""
    sound = set(order(graph))
    stuck = [node for node in graph.nodes if node.name not in sound]
    if not stuck:
        return
    needed, by_name = waits(graph), {node.name: node for node in graph.nodes}
    path, name = dict[str, None](), stuck[0].name
    while name not in path:
        path[name] = None
        name = next(other for other in sorted(needed[name]) if other not in sound)
    walked = [*path, name]
    ring = walked[walked.index(name) :]
    told = f"the nodes form a cycle: {' needs '.join(ring)}"
    yield Fault(by_name[ring[0]].where, told, "cycle")


def timed(graph: TaskGraph, took_ms: Mapping[str, float]) -> TaskGraph:
    """Use times that an earlier run measured, for nodes that declare no time."""
    if not took_ms:
        return graph
    nodes = (
        replace(node, est_ms=took_ms[node.name])
        if not node.est_ms and node.name in took_ms
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def known_bytes(graph: TaskGraph) -> dict[str, int]:
    """Return the block sizes that are known: declared ones, or else those that an earlier run
    measured.

    The size of a list is the sum of its items. It is only measured, never declared, because the
    number of items is not declared.
    """
    said = {
        block: tensor.bytes
        for block, (tensor, is_list) in declared(graph).items()
        if not is_list and tensor.bytes is not None
    }
    return {**graph.made_bytes, **said}


def worth_telling(made_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the SIZED_LIMIT blocks whose sizes differ most from USUAL_BYTES."""
    far = heapq.nlargest(SIZED_LIMIT, made_bytes.items(), key=lambda one: abs(one[1] - USUAL_BYTES))
    return dict(far)


def waits(graph: TaskGraph) -> dict[str, set[str]]:
    """Return the nodes for which each node waits."""
    maker = {block: node.name for node in graph.nodes for block in node.writes}
    return {
        node.name: {maker[block] for block in node.reads if block in maker} for node in graph.nodes
    }


# --- declared tensors ---------------------------------------------------------------------------


class _Sizes:
    """Tracks which named sizes stand for the same number, and for which number."""

    def __init__(self) -> None:
        self.known: dict[str, int | str] = {}

    def same(self, one: int | str, other: int | str) -> bool:
        """Treat both sizes as equal from now on; False if they cannot be equal."""
        one, other = self.root(one), self.root(other)
        if isinstance(one, int) and isinstance(other, int):
            return one == other
        if isinstance(one, int):
            one, other = other, one
        if one != other:
            self.known[str(one)] = other
        return True

    def root(self, size: int | str) -> int | str:
        passed = []
        while isinstance(size, str) and size in self.known:
            passed.append(size)
            size = self.known[size]
        self.known.update(dict.fromkeys(passed, size))  # shorten the chain for later look-ups
        return size

    def of(self, tensor: DeclaredTensor) -> DeclaredTensor:
        return replace(tensor, shape=tuple(self.root(size) for size in tensor.shape))


def _misfits(graph: TaskGraph) -> Iterator[Fault]:
    """Yield faults where a block and a port that takes it are declared differently."""
    sizes, made = _Sizes(), declared(graph)
    for node in graph.nodes:
        mapped = frozenset(node.map)
        for port, taken in node.inputs.items():
            wanted = node.tensors.get(port)
            pointer = f"{node.where}/inputs/{port}"
            for block in taken.sources if wanted is not None else ():
                if (why := _misfit(node, port, made.get(block), taken, sizes, mapped)) is not None:
                    yield Fault(pointer, f"{block} {why}", "misfit")
    yield from _too_large(graph, made, sizes)


def declared(graph: TaskGraph) -> dict[str, tuple[DeclaredTensor, bool]]:
    """Return the declared blocks: (declaration, True if the block is a list of such tensors)."""
    found = {f"{INPUT}{port}": (tensor, False) for port, tensor in graph.inputs.items()}
    for node in graph.nodes:
        for output in node.outputs:
            if output in node.tensors:
                found[f"{node.name}.{output}"] = (node.tensors[output], bool(node.map))
    return found


def _misfit(
    node: Node,
    port: str,
    made: tuple[DeclaredTensor, bool] | None,
    taken: Binding,
    sizes: _Sizes,
    mapped: Set[str],
) -> str | None:
    if made is None:
        return None
    tensor, is_list = made
    if (taken.is_list or is_list) != (port in mapped):
        given = "a list of tensors" if taken.is_list or is_list else "one tensor"
        wanted = "a list to map over" if port in mapped else "one tensor"
        return f"must be {wanted} for {port!r} of {node.name}; got {given}"
    if taken.is_list and is_list:
        return f"must be a list of tensors for {port!r} of {node.name}; got a list of lists"
    wanted_tensor = node.tensors[port]
    fits = len(tensor.shape) == len(wanted_tensor.shape) and tensor.dtype == wanted_tensor.dtype
    pairs = zip(tensor.shape, wanted_tensor.shape, strict=False)
    if fits and all([sizes.same(one, other) for one, other in pairs]):
        return None
    shown = f"{_shown(sizes.of(tensor))}, but {port!r} of {node.name} takes"
    return f"is {shown} {_shown(sizes.of(wanted_tensor))}"


def _shown(tensor: DeclaredTensor) -> str:
    return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"


def _too_large(
    graph: TaskGraph, made: Mapping[str, tuple[DeclaredTensor, bool]], sizes: _Sizes
) -> Iterator[Fault]:
    """Yield faults for nodes whose own blocks exceed the memory limit of the graph."""
    if not graph.memory_bytes:
        return
    for node in graph.nodes:
        least = least_bytes(node, made, sizes)
        if least > graph.memory_bytes:
            told = f"the blocks and the work of the node need at least {least} bytes"
            limit = f"{graph.where}/limits/memory_bytes is {graph.memory_bytes}"
            yield Fault(node.where, f"{told}, but {limit}", "memory")


def least_bytes(
    node: Node, made: Mapping[str, tuple[DeclaredTensor, bool]], sizes: _Sizes | None = None
) -> int:
    """Return the least bytes that a node, or one of its shards, needs at the same time, as
    declared.
    """
    sizes = sizes or _Sizes()
    inout = frozenset(node.inout)
    written = (output for output in node.outputs if output not in inout)
    known = {f"{node.name}.{port}": node.tensors.get(port) for port in written}
    for port, taken in node.inputs.items():
        for block in taken.sources:
            known[block] = made[block][0] if block in made else node.tensors.get(port)
    sized = (sizes.of(tensor).bytes or 0 for tensor in known.values() if tensor is not None)
    return node.memory_bytes + sum(sized)


def largest(graph: TaskGraph) -> tuple[Node, int]:
    """Return the node that needs the most memory at once by its declarations, and its bytes."""
    made = declared(graph)
    return max(((node, least_bytes(node, made)) for node in graph.nodes), key=lambda pair: pair[1])


# --- fit to the task ----------------------------------------------------------------------------


def check_task(graph: TaskGraph, task: TaskDescriptor, pointer: str) -> tuple[Fault, ...]:
    """Report ports of the graph that its task does not connect, and inputs and outputs that the
    graph lacks.
    """
    return tuple(_loose(graph, task, pointer))


def _loose(graph: TaskGraph, task: TaskDescriptor, pointer: str) -> Iterator[Fault]:
    ports, hints = dict.fromkeys(graph.ports), Hints()
    for port in ports:
        if port not in task.inputs:
            told = f"the graph reads {INPUT}{port}, but the task has no such input"
            yield Fault(f"{pointer}/inputs", told, "unbound")
    for port in task.inputs:
        if port not in ports:
            told = f"no node of the graph reads {INPUT}{port}{hints.hint(port, ports)}"
            yield Fault(f"{pointer}/inputs/{port}", told, "unbound")
    for n, output in enumerate(task.outputs):
        if output not in graph.outputs:
            told = f"the graph has no output {output!r}{hints.hint(output, graph.outputs)}"
            yield Fault(f"{pointer}/outputs/{n}", told, "unbound")
    room = task.devices.memory_bytes
    node, least = largest(graph)
    if room and least > room:
        told = f"the node {node.name} needs at least {least} bytes at once"
        yield Fault(
            f"{pointer}/devices/memory_bytes", f"the device has {room} bytes, but {told}", "memory"
        )


# --- the order ----------------------------------------------------------------------------------


def order(graph: TaskGraph) -> tuple[str, ...]:
    """Return the nodes in an order in which each comes after the nodes that it needs.

    Nodes in cycles are left out. Among nodes that are ready, the first is the one after which the
    fewest blocks must be kept: it is the last reader of more blocks than it writes. Among equals,
    the node that became ready last goes first, so that data is used while it is in the cache. A
    node that would overwrite blocks waits until all other readers of these blocks have run.
    """
    return tuple(graph.nodes[n].name for n in _Ordering(graph).run())


class _Ordering:
    def __init__(self, graph: TaskGraph) -> None:
        self.nodes = graph.nodes
        number, needed = {node.name: n for n, node in enumerate(graph.nodes)}, waits(graph)
        self.waits = {number[name]: len(others) for name, others in needed.items()}
        self.followers: list[list[int]] = [[] for _ in graph.nodes]
        for name, others in needed.items():
            for other in others:
                self.followers[number[other]].append(number[name])
        kept = set(graph.outputs.values())
        self.readers: dict[str, set[int]] = {}
        for n, node in enumerate(graph.nodes):
            for block in node.reads:
                self.readers.setdefault(block, {-1} if block in kept else set()).add(n)
        self.ready_at = dict[int, int]()
        self.heap: list[tuple[tuple[bool, int, int, int], int]] = []

    def run(self) -> list[int]:
        found = list[int]()
        for n in reversed(range(len(self.nodes))):
            if not self.waits[n]:
                self._is_ready(n)
        while self.heap:
            key, n = heapq.heappop(self.heap)
            if self.waits[n] < 0:
                continue  # already ordered: this is an outdated entry of the heap
            if key != self._key(n):
                heapq.heappush(self.heap, (self._key(n), n))
                continue
            self.waits[n] = -1
            found.append(n)
            self._did(n)
        return found

    def _did(self, n: int) -> None:
        for block in self.nodes[n].reads:
            left = self.readers[block]
            left.discard(n)
            if len(left) == 1 and (last := next(iter(left))) in self.ready_at:
                heapq.heappush(self.heap, (self._key(last), last))  # its priority has risen
        for follower in reversed(self.followers[n]):
            self.waits[follower] -= 1
            if not self.waits[follower]:
                self._is_ready(follower)

    def _is_ready(self, n: int) -> None:
        self.ready_at[n] = len(self.ready_at)
        heapq.heappush(self.heap, (self._key(n), n))

    def _key(self, n: int) -> tuple[bool, int, int, int]:
        node = self.nodes[n]
        overwrites = [b for port in node.inout for b in node.inputs[port].sources]
        spoils = any(len(self.readers[block]) > 1 for block in overwrites)
        freed = sum(len(self.readers[block]) == 1 for block in node.reads)
        return spoils, len(node.outputs) - freed, -self.ready_at[n], n


# --- what a resident runs -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Describes a node in the program, with blocks as numbers. `inputs` are (port, blocks, is it a
    list).

    `frees` are the blocks that no later node reads. `memory_bytes` is what the node takes besides
    its blocks. `is_sized`: the sizes of all blocks that it writes are known.
    """

    name: str
    function: str
    inputs: tuple[tuple[str, tuple[int, ...], bool], ...]
    outputs: tuple[tuple[str, int], ...]
    params: Mapping[str, Any]
    inout: tuple[str, ...]
    map: tuple[str, ...]
    frees: tuple[int, ...]
    tensors: Mapping[str, DeclaredTensor]
    memory_bytes: int
    draws: bool
    is_sized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Describes a graph as a resident runs it; `blocks` are names by number, the inputs first, by
    port.
    """

    units: tuple[Unit, ...]
    blocks: tuple[str, ...]
    outputs: Mapping[str, int]
    memory_bytes: int = 0

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units)


def program(graph: TaskGraph, names: Sequence[str] = ()) -> Program:
    """Build the program with the nodes in the order `names`; by default in the order that `order`
    gives.
    """
    by_name = {node.name: node for node in graph.nodes}
    nodes = [by_name[name] for name in names or order(graph)]
    blocks = [f"{INPUT}{port}" for port in graph.ports]
    blocks += [block for node in nodes for block in node.writes]
    number = {block: n for n, block in enumerate(blocks)}
    last = {block: node.name for node in nodes for block in (*node.writes, *node.reads)}
    kept, known = set(graph.outputs.values()), {*known_bytes(graph)}
    units = []
    for node in nodes:
        touched = dict.fromkeys((*node.reads, *node.writes))
        frees = [b for b in touched if last[b] == node.name and b not in kept]
        units.append(
            Unit(
                name=node.name,
                function=node.function,
                inputs=tuple(
                    (port, tuple(number[b] for b in taken.sources), taken.is_list)
                    for port, taken in node.inputs.items()
                ),
                outputs=tuple((output, number[f"{node.name}.{output}"]) for output in node.outputs),
                params=node.params,
                inout=node.inout,
                map=node.map,
                frees=tuple(number[b] for b in frees),
                tensors=node.tensors,
                memory_bytes=node.memory_bytes,
                draws=node.draws,
                is_sized=known.issuperset(node.writes),
            )
        )
    outputs = {port: number[block] for port, block in graph.outputs.items()}
    return Program(
        units=tuple(units),
        blocks=tuple(blocks),
        outputs=outputs,
        memory_bytes=graph.memory_bytes,
    )
