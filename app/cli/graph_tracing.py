"""Record a graph by calling its functions, in a notebook or a script; the result is its JSON.

    encode = node(ops.encode, "h")            # a function, or its name: node("ops:encode", "h")
    vote = node("ops:vote", "y")

    with graph() as g:
        raw = g.input("raw")
        h = encode(each(raw), width=64)       # a shard for each item of the list
        g.output(y=vote(parts=h))

    task = {"name": "whole", "run": {"graph": g.json()}, "inputs": {"raw": "prep.x"}, ...}

No function runs, and the bundle does not need this module: the result is JSON for a request.
A block, or a list of blocks, becomes an input of the node that it is passed to; any other argument
becomes a parameter.  A graph that is called inside another graph becomes a part of it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any

from app.core.model.graphs import task_graph

JSON = dict[str, Any]

_open: ContextVar[TracedGraph | None] = ContextVar(
    "the graph that calls are written into", default=None
)


class NotTraced(TypeError):
    """A call that cannot become a node; the message says why."""


@dataclass(frozen=True, slots=True)
class Block:
    """The output of a node, or an input of the graph."""

    graph: TracedGraph
    source: str


@dataclass(frozen=True, slots=True)
class Each:
    """The items of a list, to be mapped over."""

    taken: Block | Sequence[Block]


def each(taken: Block | Sequence[Block]) -> Each:
    """Mark an argument of a node, which then runs once for each item."""
    return Each(taken)


class TracedGraph:
    """Records the calls within `with` as nodes.

    A call of the graph itself becomes a node of the outer graph.
    """

    def __init__(self, name: str = "part", *, memory_bytes: int = 0) -> None:
        self.name, self.memory_bytes = name, memory_bytes
        self.nodes: list[JSON] = []
        self.outputs: dict[str, str] = {}
        self.tensors: JSON = {}
        self._taken = Counter[str]()
        self._tokens: list[Token[TracedGraph | None]] = []

    def __enter__(self) -> TracedGraph:
        self._tokens.append(_open.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _open.reset(self._tokens.pop())

    def input(
        self, port: str, dtype: str | None = None, shape: Sequence[int | str] | None = None
    ) -> Block:
        """Declare an input of the graph; a dtype and a shape are checked."""
        if dtype is not None and shape is not None:
            self.tensors[port] = {"dtype": dtype, "shape": list(shape)}
        return Block(self, f"{task_graph.INPUT}{port}")

    def output(self, **blocks: Block) -> None:
        """Declare the outputs of the graph, by name."""
        self.outputs |= {port: self._source(port, block) for port, block in blocks.items()}

    def json(self) -> JSON:
        """Return the JSON.  Raises app.core.model.descriptor.BadDescriptor with all faults."""
        body = self._body()
        if self.memory_bytes:
            body["limits"] = {"memory_bytes": self.memory_bytes}
        task_graph.parse(body)
        return body

    @property
    def sha256(self) -> str:
        """The hash by which a request names the graph after the graph was sent: `run: {graph:
        "sha256:…"}`.
        """
        return hashlib.sha256(task_graph.canonical(self.json())).hexdigest()

    def __call__(self, **given: Block | Sequence[Block]) -> Any:
        around = _around(self.name)
        if around is self:
            raise NotTraced(f"the graph {self.name!r} is called inside itself")
        inputs = {port: around._taken_by(port, block) for port, block in given.items()}
        named = around._named(self.name)
        around.nodes.append({"name": named, "graph": self._body(), "inputs": inputs})
        return _blocks(around, named, tuple(self.outputs))

    # --- for nodes ---

    def _body(self) -> JSON:
        body: JSON = {"nodes": list(self.nodes), "outputs": dict(self.outputs)}
        return {**body, "tensors": dict(self.tensors)} if self.tensors else body

    def _named(self, name: str) -> str:
        """Return the name; if an earlier node has it, a number is added."""
        self._taken[name] += 1
        count = self._taken[name]
        return name if count == 1 else self._named(f"{name}-{count}")

    def _taken_by(self, port: str, given: Block | Sequence[Block]) -> str | list[str]:
        if isinstance(given, Block):
            return self._source(port, given)
        return [self._source(port, block) for block in given]

    def _source(self, port: str, block: Block) -> str:
        if not isinstance(block, Block) or block.graph is not self:
            told = "a block of another graph" if isinstance(block, Block) else type(block).__name__
            raise NotTraced(f"{port!r} must be a block of this graph; got {told}")
        return block.source


def graph(name: str = "part", *, memory_bytes: int = 0) -> TracedGraph:
    """Create a graph; `memory_bytes` limits the memory of its blocks on the device."""
    return TracedGraph(name, memory_bytes=memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedNode:
    """Represents a function of the bundle. A call records a node and returns its future outputs."""

    function: str
    outputs: tuple[str, ...]
    name: str
    ports: tuple[str, ...] = ()  # names of the function's arguments, if known
    more: Mapping[str, Any]

    def named(self, name: str) -> TracedNode:
        """Return a copy that gives its nodes this name."""
        return replace(self, name=name)

    def __call__(self, *args: Any, **given: Any) -> Any:
        around = _around(self.name)
        inputs, params, mapped = JSON(), JSON(), list[str]()
        for port, value in self._by_port(args, given).items():
            if isinstance(value, Each):
                mapped.append(port)
                value = value.taken
            if isinstance(value, Block) or _are_blocks(value):
                inputs[port] = around._taken_by(port, value)
            else:
                params[port] = value
        named = around._named(self.name)
        body = {"name": named, "function": self.function, "inputs": inputs}
        body |= {"outputs": list(self.outputs), **self.more}
        body |= {"params": params} if params else {}
        body |= {"map": mapped} if mapped else {}
        around.nodes.append(body)
        return _blocks(around, named, self.outputs)

    def _by_port(self, args: tuple[Any, ...], given: JSON) -> JSON:
        if len(args) > len(self.ports):
            known = (
                f"its ports are {', '.join(self.ports)}"
                if self.ports
                else "pass each argument by name"
            )
            raise NotTraced(f"{self.function} got {len(args)} positional arguments: {known}")
        by_port = dict(zip(self.ports, args, strict=False))
        if twice := by_port.keys() & given.keys():
            raise NotTraced(f"{self.function} got two values for {', '.join(sorted(twice))}")
        return {**by_port, **given}


def node(function: str | Callable[..., Any], *outputs: str, **more: Any) -> TracedNode:
    """Create a node from a function, or its "module:name", and the names of the blocks that it
    returns.

    `more` has the optional fields of a node: `inout`, `tensors`, `est`, `draws`.
    """
    ports: tuple[str, ...] = ()
    if not isinstance(function, str):
        ports = tuple(inspect.signature(function).parameters)[1:]  # after ctx
        function = f"{function.__module__}:{function.__qualname__}"
    name = function.rpartition(":")[2].lower().strip("_")
    return TracedNode(function=function, outputs=outputs, name=name, ports=ports, more=more)


def _around(name: str) -> TracedGraph:
    found = _open.get()
    if found is None:
        raise NotTraced(f"{name} must be called within `with graph() as g:`")
    return found


def _are_blocks(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Block)


def _blocks(graph: TracedGraph, name: str, outputs: tuple[str, ...]) -> Any:
    """Return one block, or a tuple of them in the order of the outputs."""
    made = tuple(Block(graph, f"{name}.{output}") for output in outputs)
    return made[0] if len(made) == 1 else made
