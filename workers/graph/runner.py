"""Runs a task that is a graph, inside its resident: node after node, for some milliseconds in each
step.

The scheduler is not asked between two nodes. A step runs a burst of nodes, so that the state
between two steps is small: the number of nodes that are done, and the blocks that are still needed.
Images hold this state as plain lists and dicts around the tenant's own values. So a graph is
paused, moved and continued like any other job.

Invariants: * a node's random numbers depend on its name alone, not on what ran before it; those of
a shard also depend on its number (`node_rng`); * a block is freed when the last node that reads it
has run; * only an in-out port may write to a block's memory, and only while nothing else needs the
block: otherwise the node gets a copy. A node that writes to any other tensor given to it fails.
"""

from __future__ import annotations

import bisect
import copy
import gc
import heapq
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch

from app.core.model.graphs import task_graph
from app.core.model.graphs.task_graph import (
    INPUT,
    MAX_BYTES,
    DeclaredTensor,
    TaskGraph,
    Unit,
    worth_telling,
)
from workers.graph.node_rng import NodeRandom, seed_of
from workers.graph.spill import Piece, SpillBudget
from workers.hardware.accelerator import Accelerator

JSON = dict[str, Any]

# numbers reserved for each place in the program: more than any list has items; see `_pieces`
ITEMS = 1 << 20
BURST_S = 0.002  # seconds after which a step starts no further node
TIMED_LIMIT = 1000  # most nodes to report times of: the longest
WEIGH_S = 1e-4  # in seconds: if a node took longer, its blocks are weighed after every call
PARTS = 8  # a block with more parts than this is weighed only if its node took long
# seconds of the node's time for each further part; weighing a part costs a twentieth of this
PART_S = 5e-6
WEIGHED_ITEMS = 32  # most items that are weighed of a list made by shards
_clock = time.perf_counter
_Tensor = torch.Tensor
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = (int, float, complex, str, bytes, types.NoneType)
NUMBER_BYTES = 8
_NOTHING = object()
_WROTE = (
    "the function wrote to a tensor that other nodes may read: name the port in `inout` and "
    "`outputs`, or create a new tensor"
)


class NodeFailed(Exception):
    """Raised when a node raised an exception; that exception is the cause (`__cause__`)."""

    def __init__(self, node: str, function: str) -> None:
        self.node, self.function = node, function
        super().__init__(f"node {node} ({function})")


class BadBlock(Exception):
    """Raised when a node did not keep to its ports; says how, and what to do."""


class Loaded:
    """Holds a graph and its functions, ready to begin, or to continue from a state."""

    def __init__(
        self,
        body: JSON | TaskGraph,
        find: Callable[[str], Callable[..., Any]],
        accelerator: Accelerator,
        *,
        budget_bytes: int = 0,
        host_bytes: int = sys.maxsize,
        late: Sequence[str] = (),
        order: Sequence[str] = (),
    ) -> None:
        """Load a graph; `find` returns the function for "module:name".

        `late` are inputs that may come after the start. The nodes run in `order`, or in an order
        that is computed. `budget_bytes` is the limit for blocks on the device, unless the graph has
        its own; 0 means none. `host_bytes` limits the blocks that are spilled to host memory.
        """
        self.graph = body if isinstance(body, TaskGraph) else task_graph.parse(body)
        self.late, self.ports = late, self.graph.ports
        self.room: SpillBudget | None = None
        if budget_bytes := self.graph.memory_bytes or budget_bytes:
            self.room = SpillBudget(budget_bytes, host_bytes, accelerator)
        named = dict.fromkeys(node.function for node in self.graph.nodes)
        self.functions = {name: find(name) for name in named}
        self.random = NodeRandom(accelerator)
        self.order(order)

    def order(self, names: Sequence[str]) -> None:
        self.program = task_graph.program(self.graph, names)
        self.calls = [UnitCall(unit, self.functions[unit.function]) for unit in self.program.units]
        # bytes of each block made here; None if the block could not be weighed quickly
        self.weighed = dict[int, int | None]()
        units = enumerate(self.program.units)
        self.maker_at = {n: at for at, unit in units for _, n in unit.outputs}
        given = {*self.program.outputs.values()}
        self.gives = {at + 1 for n, at in self.maker_at.items() if n in given}
        self.plain_until = self._plain_until()

    def _plain_until(self) -> list[int]:
        """Return for each place the end of the run of plain calls that begins there (see
        `UnitCall.is_plain`).

        A run also ends after a call that makes an output of the graph.
        """
        ends = list(range(len(self.calls)))
        for at in reversed(ends):
            if self.calls[at].is_plain and self.room is None:
                is_last = at + 1 in self.gives or at + 1 == len(ends)
                ends[at] = at + 1 if is_last else max(at + 1, ends[at + 1])
        return ends

    def begin(self, inputs: JSON) -> GraphJob:
        """Begin the graph; `inputs` by port belong to the graph from now on.

        Inputs of `late` that are missing in `inputs` come while the graph runs.
        """
        lacks = [port for port in self.late if port not in inputs]
        there = [port for port in self.ports if port not in lacks]
        blocks = {f"{INPUT}{port}": inputs.pop(port) for port in there}
        return GraphJob(self, {"blocks": blocks, "lacks": lacks})

    def go_on(self, state: JSON) -> GraphJob:
        """Continue from the result of `GraphJob.state`, made in any process."""
        # another version of Roundhouse has computed another order
        if tuple(state["order"]) != self.program.order:
            self.order(state["order"])
        return GraphJob(self, state)


class GraphJob:
    """Tracks the progress of a graph: `done` units of its program, and `shards` of the current
    unit, have run.

    `count` is the number of nodes and shards that have run. While a unit maps, `items` are the
    lists that it maps over, by port, and each item is dropped after its shard. Items of lists in
    `owned` may be written to. `sizes` are the numbers that stand for names in declared shapes.
    """

    first = 0  # number of this executor's first shard
    total = 0  # number of shards of all executors

    def __init__(self, loaded: Loaded, state: JSON) -> None:
        self.program, self.calls, self.random = loaded.program, loaded.calls, loaded.random
        self.room = loaded.room
        self.maker_at, self.gives = loaded.maker_at, loaded.gives
        self.plain_until = loaded.plain_until
        self.blocks: list[Any] = [state["blocks"].get(name) for name in self.program.blocks]
        self.done: int = state.get("done", 0)
        self.shards: int = state.get("shards", 0)
        self.count: int = state.get("count", 0)
        self.items: dict[str, list[Any]] | None = state.get("items")
        self.owned: list[str] = state.get("owned", [])
        self.sizes: dict[str, int] = state.get("sizes", {})
        names = self.program.blocks
        self.lacks = {names.index(f"{INPUT}{port}"): port for port in state.get("lacks", ())}
        self.wrote = dict[str, int]()  # function -> bytes that it last wrote
        self.took_s = dict[int, float]()  # place in `calls` -> seconds in this process
        # for a unit that maps: place in `calls` -> number of its shards in `took_s`
        self.shards_here = dict[int, int]()
        self.weighed = loaded.weighed
        self.told = 0  # number of units with outputs already returned by `made`
        if self.room is not None:
            self.readers = self._readers()
            self.room.restore(state.get("aside", []), self._values())

    def state(self) -> JSON:
        live = {n: self.blocks[n] for n in self._live() if n not in self.lacks}
        lacks = {"lacks": list(self.lacks.values())} if self.lacks else {}
        return {"order": list(self.program.order), **self._state(live), **lacks}

    def _state(self, blocks: Mapping[int, Any]) -> JSON:
        """Return the progress together with these blocks."""
        aside = {} if self.room is None else {"aside": self.room.aside(self._values())}
        return {
            "done": self.done,
            "shards": self.shards,
            "count": self.count,
            "items": self.items,
            "owned": self.owned,
            "sizes": self.sizes,
            "blocks": {self.program.blocks[n]: value for n, value in blocks.items()},
            **aside,
        }

    def _live(self) -> list[int]:
        """Return the blocks that are made, or being made, and still needed."""
        units, at = self.program.units, self.done
        live = {n for n, name in enumerate(self.program.blocks) if name.startswith(INPUT)}
        for unit in units[: at + 1 if self.items is not None else at]:
            live.update(n for _, n in unit.outputs)
        for unit in units[:at]:
            live.difference_update(unit.frees)
        return sorted(live)

    def awaited(self) -> str | None:
        """Return the input that the next node reads and that has not arrived, if any."""
        if not self.lacks or self.done == len(self.calls):
            return None
        reads = (n for _, many, _ in self.calls[self.done].unit.inputs for n in many)
        return next((self.lacks[n] for n in reads if n in self.lacks), None)

    def take(self, port: str, value: Any) -> None:
        """Accept a late input."""
        n = next(n for n, lacked in self.lacks.items() if lacked == port)
        self.blocks[n] = value
        del self.lacks[n]

    def made(self) -> JSON:
        """Return the graph's outputs, by port, that were made since the last call.

        No node writes to them any more, so they are equal to the outputs at the end.
        """
        new, self.told = range(self.told, self.done), self.done
        outputs = self.program.outputs.items()
        return {port: self.blocks[n] for port, n in outputs if self.maker_at.get(n) in new}

    def let_lie(self, port: str, value: Any) -> list[str]:
        """Replace an output by an equal value that is stored elsewhere; returns all ports with this
        output.
        """
        n = self.program.outputs[port]
        self.blocks[n] = value
        return [other for other, m in self.program.outputs.items() if m == n]

    def took_ms(self) -> dict[str, float]:
        """Return the nodes that took longest in this process, with their milliseconds; for a map
        per shard.
        """
        mean = ((at, took_s / self.shards_here.get(at, 1)) for at, took_s in self.took_s.items())
        longest = heapq.nlargest(TIMED_LIMIT, mean, key=lambda one: one[1])
        return {self.calls[at].name: round(1e3 * took_s, 3) for at, took_s in longest}

    def made_bytes(self) -> dict[str, int]:
        """Return the sizes of blocks made in this process without a declared size, in bytes.

        Only the sizes that plans need most are returned.
        """
        names, units = self.program.blocks, self.program.units
        said = {n for unit in units for port, n in unit.outputs if _is_said(unit, port)}
        found = {n: b for n, b in self.weighed.items() if b is not None and n not in said}
        # The nominal size of an expanded tensor may exceed any memory.
        return worth_telling({names[n]: b for n, b in found.items() if b <= MAX_BYTES})

    @property
    def spilled_bytes(self) -> int:
        """The bytes of host memory that its blocks take."""
        return 0 if self.room is None else self.room.held_bytes

    # --- a burst ---

    def step(self, ctx: Any) -> None:
        """Run at least one node, then more until BURST_S has passed or a node has made an output.

        Calls `ctx.finish` when all have run. Raises NodeFailed.
        """
        until_s, calls = _clock() + BURST_S, self.calls
        while self.done < len(calls):
            if plain := self._plain_ahead():
                self.done = self._burst(ctx, plain, until_s)
            elif self._node(ctx, calls[self.done], until_s):
                self.done += 1
            else:
                return
            if self.done in self.gives or not self._goes_on(ctx, until_s) or self.awaited():
                break
        if self.done == len(calls) and ctx.result is None:
            ctx.finish({port: self.blocks[n] for port, n in self.program.outputs.items()})

    def _plain_ahead(self) -> range:
        """Return the places of the next plain calls; at most one place while late inputs are
        missing.
        """
        end = self.plain_until[self.done]
        return range(self.done, min(end, self.done + 1) if self.lacks else end)

    def _goes_on(self, ctx: Any, until_s: float) -> bool:
        return _clock() < until_s and ctx.result is None

    def _node(self, ctx: Any, call: UnitCall, until_s: float) -> bool:
        """Run a node, or some of its shards; True if the node is complete."""
        try:
            if call.map:
                return self._map(ctx, call, until_s)
            self._run(ctx, call)
        except BaseException as error:
            raise NodeFailed(call.name, call.unit.function) from error
        return True

    def _run(self, ctx: Any, call: UnitCall) -> None:
        blocks, given = self.blocks, self._given(call)
        copied = self._copied(call) if call.inout else ()
        if self.room is not None:
            self._make_room(self.room, call, given, copied)
        for port in copied:
            given[port] = copy.deepcopy(given[port])
        returned = self._called(ctx, call, given, call.seed)
        for name, n in call.gives:
            blocks[n] = returned[name]
        for n in call.frees:
            blocks[n] = None
        self.count += 1

    # --- a burst of plain calls: each does the same as `_run`, in as few operations as possible ---

    def _burst(self, ctx: Any, places: range, until_s: float) -> int:
        """Run at least one plain call of `places`, and more while there is time.

        Return the place after the last.
        """
        calls, blocks, now_s = self.calls, self.blocks, _clock()
        try:
            for at in places:
                call = calls[at]
                given = call.given.copy()
                for port, n in call.takes:
                    given[port] = blocks[n]
                for port, many in call.lists:
                    given[port] = [blocks[n] for n in many]
                now_s = self._plain(ctx, call, at, given, now_s)
                if now_s >= until_s or ctx.result is not None:
                    break
        except BaseException as error:
            raise NodeFailed(call.name, call.unit.function) from error
        return at + 1

    def _plain(self, ctx: Any, call: UnitCall, at: int, given: JSON, began_s: float) -> float:
        """Run one plain call; returns its end time, which is the next call's start."""
        watched, blocks = [], self.blocks
        for port, _ in call.takes:
            value = given[port]
            if type(value) is _Tensor and not value.is_inference():
                watched.append((value, value._version))
        self.random.seed(call.seed)
        returned = call.function(ctx, **given)
        ended_s = _clock()
        for value, version in watched:
            if value._version != version:
                raise BadBlock(_WROTE)
        self._keep(call, returned)
        took_s = self.took_s[at] = ended_s - began_s
        if call.weighs or took_s > WEIGH_S:
            self._weigh(call, returned, took_s)
        for n in call.frees:
            blocks[n] = None
        self.count += 1
        return ended_s

    def _keep(self, call: UnitCall, returned: Any) -> None:
        """Store the blocks that a plain call returned, after checking them."""
        blocks = self.blocks
        if type(returned) is not dict or len(returned) != len(call.gives):
            raise BadBlock(_not_the_outputs(call, returned))
        for name, n in call.gives:
            value = blocks[n] = returned.get(name, _NOTHING)
            if type(value) is _Tensor and value.grad_fn is not None:
                raise BadBlock(_history(name))
            if value is _NOTHING:
                raise BadBlock(_not_the_outputs(call, returned))

    def _copied(self, call: UnitCall) -> list[str]:
        """Return the in-out ports that need a copy, because their block is also needed
        elsewhere.
        """
        return [p for p, n in call.inout if n not in call.only_here or self._is_shared(n)]

    def _given(self, call: UnitCall) -> JSON:
        blocks = self.blocks
        given = {port: blocks[n] for port, n in call.takes}
        if call.lists:
            given.update((port, [blocks[n] for n in many]) for port, many in call.lists)
        return given

    def _called(self, ctx: Any, call: UnitCall, given: JSON, seed: int | None) -> JSON:
        """Call the function and return the blocks that it made.

        Raises BadBlock if they do not match the declaration.
        """
        if call.tensors:
            self._must_fit(call.tensors, given)
        read = given.values() if not call.inout else [given[port] for port in call.only_read]
        before, began_s = _versions(read), _clock()
        self.random.seed(seed)
        returned = call.function(ctx, **{**given, **call.params})
        took_s = _clock() - began_s
        self._count(took_s, is_shard=bool(call.map))
        for tensor, version in before:
            if tensor._version != version:
                raise BadBlock(_WROTE)
        if type(returned) is not dict or returned.keys() != call.names:
            raise BadBlock(_not_the_outputs(call, returned))
        for name, value in returned.items():
            if type(value) is torch.Tensor and value.grad_fn is not None:
                raise BadBlock(_history(name))
        if call.tensors:
            self._must_fit(call.tensors, returned)
        if self.room is not None:
            self.wrote[call.unit.function] = self.room.made(returned, given)
        if (call.weighs or took_s > WEIGH_S) and not call.map:
            self._weigh(call, returned, took_s)
        return returned

    def _count(self, took_s: float, *, is_shard: bool) -> None:
        self.took_s[self.done] = self.took_s.get(self.done, 0.0) + took_s
        if is_shard:
            self.shards_here[self.done] = self.shards_here.get(self.done, 0) + 1

    # --- shards ---

    def _map(self, ctx: Any, call: UnitCall, until_s: float) -> bool:
        """Run shards while there is time; True if all have run."""
        if self.items is None:
            self._open(call)
        assert self.items is not None
        blocks, items, total = self.blocks, self.items, len(self.items[call.map[0]])
        for_all = self._given(call)
        while self.shards < total:
            given = for_all | {port: listed[self.shards] for port, listed in items.items()}
            copied = [port for port, _ in call.inout if port not in self.owned]
            if self.room is not None:
                self._make_room(self.room, call, given, copied)
            for port in copied:
                given[port] = copy.deepcopy(given[port])
            shard = self.first + self.shards
            seed = None if call.seed is None else seed_of(f"{call.name}#{shard}")
            returned = self._called(ctx, call, given, seed)
            for name, n in call.gives:
                blocks[n].append(returned[name])
            for listed in items.values():
                listed[self.shards] = None
            self.shards += 1
            self.count += 1
            if self.shards < total and not self._goes_on(ctx, until_s):
                return False
        self._weigh_lists(call)
        for n in call.frees:
            blocks[n] = None
        self.items, self.owned, self.shards = None, [], 0
        return True

    def _open(self, call: UnitCall) -> None:
        """Prepare the lists to map over.

        If no other unit reads a list, each item is freed after its shard.
        """
        mapped = self._mapped(call)
        if len({total for _, total in mapped.values()}) > 1:
            told = ", ".join(f"{total} of {port!r}" for port, (_, total) in mapped.items())
            raise BadBlock(f"it maps over lists in step, and they have {told} items")
        lists = {port: items for port, (items, _) in mapped.items()}
        _, self.total = mapped[call.map[0]]
        self.owned = [p for p, n in call.inout if p in lists and self._may_write(p, n, lists, call)]
        for port, n in call.takes:
            if port in lists and n in call.only_here:
                self.blocks[n] = None
        for _, n in call.gives:
            self.blocks[n] = []
        self.items = lists

    def _mapped(self, call: UnitCall) -> dict[str, tuple[list[Any], int]]:
        """Return the items to map over here, by port, and the length of the whole list."""
        found = {port: items_of(port, self.blocks[n]) for port, n in call.takes if port in call.map}
        found |= {p: [self.blocks[n] for n in many] for p, many in call.lists if p in call.map}
        return {port: (items, len(items)) for port, items in found.items()}

    def _may_write(self, port: str, n: int, lists: JSON, call: UnitCall) -> bool:
        """True if a map may write to a list's items: nothing else shares them, and they share
        nothing with each other.
        """
        if n not in call.only_here or self._is_shared(n):
            return False
        of_items = [parts_of(item) for item in lists[port]]
        return sum(map(len, of_items)) == len(frozenset().union(*of_items))

    # --- how large ---

    def _weigh(self, call: UnitCall, returned: JSON, took_s: float) -> None:
        """Find the size of a node's blocks.

        For a short node this takes as long as the node, so it is done only once.
        """
        for name, n in call.gives:
            self.weighed[n] = weigh(returned[name], PARTS + int(took_s / PART_S))
        call.weighs = False

    def _weigh_lists(self, call: UnitCall) -> None:
        """Estimate the size of lists that shards made, from the first items made here."""
        for _, n in call.gives:
            items = self.blocks[n]
            first = items[:WEIGHED_ITEMS]
            found = weigh(first, PARTS * len(first) + 1)
            if first and found is not None:
                self.weighed[n] = found * self._in_all(len(items)) // len(first)

    def _in_all(self, here: int) -> int:
        """Return the length of a whole list, of which this process made `here` items.

        Here this process makes all of them. An executor makes a part, and overrides this.
        """
        return here

    # --- how much memory ---

    def _readers(self) -> list[list[int]]:
        """Return the places in `calls` at which each block is read."""
        found: list[list[int]] = [[] for _ in self.blocks]
        for at, call in enumerate(self.calls):
            for n in {n for _, many, _ in call.unit.inputs for n in many}:
                found[n].append(at)
        return found

    def _make_room(
        self, room: SpillBudget, call: UnitCall, given: JSON, copied: Sequence[str]
    ) -> None:
        """Free memory for all that a node reads and writes, and for copies of the blocks that it
        writes to.

        If sizes are not declared, the guess is the bytes that the function wrote when it last ran.
        """
        declared = self._declared(call)
        copies = sum(room.new_bytes(given[port], ()) for port in copied)
        more = call.unit.memory_bytes + declared + copies
        likely = max(0, self.wrote.get(call.unit.function, 0) - declared)
        room.make(given.values(), self._pieces(), more, likely_bytes=likely)
        for port, _ in call.inout:
            if port not in copied:
                room.forget(given[port])

    def _pieces(self) -> Iterator[Piece]:
        """Yield every value that is held, with the place of its next use.

        The items of a list are yielded one by one.
        """
        for listed in (self.items or {}).values():
            yield from ((self.done * ITEMS + k, item) for k, item in enumerate(listed))
        for n, value in enumerate(self.blocks):
            if value is None:
                continue
            readers = self.readers[n]
            later = bisect.bisect_left(readers, self.done + (self.items is not None))
            at = readers[later] if later < len(readers) else None
            if not isinstance(value, list) or at is None:
                yield (None if at is None else at * ITEMS), value
            else:
                mapped = n in self.calls[at].mapped
                yield from ((at * ITEMS + (k if mapped else 0), v) for k, v in enumerate(value))

    def _values(self) -> Iterator[object]:
        return (value for _, value in self._pieces())

    def _declared(self, call: UnitCall) -> int:
        if not call.tensors:
            return 0
        written = [name for name, _ in call.gives if name not in call.unit.inout]
        declared = [call.tensors[name] for name in written if name in call.tensors]
        known = (tuple(map(self._length, tensor.shape)) for tensor in declared)
        sized = (replace(tensor, shape=s) for tensor, s in zip(declared, known, strict=True))
        return sum(tensor.bytes or 0 for tensor in sized)

    def _length(self, size: int | str) -> int | str:
        """Return a dimension's length, or its name while the length is unknown."""
        return size if isinstance(size, int) else self.sizes.get(size, size)

    # --- shared memory ---

    def _is_shared(self, n: int) -> bool:
        """True if another block holds a part of this one, or is a view of it."""
        own = parts_of(self.blocks[n])
        others = (value for m, value in enumerate(self.blocks) if m != n and value is not None)
        return any(not own.isdisjoint(parts_of(value)) for value in others)

    def _must_fit(self, declared: Mapping[str, DeclaredTensor], values: JSON) -> None:
        for port, tensor in declared.items():
            if port in values and not self._fits(tensor, values[port]):
                known = {s: self.sizes[s] for s in tensor.shape if s in self.sizes}
                raise BadBlock(
                    f"{port!r} is {_shown(values[port])}, but declared as {tensor} {known}"
                )

    def _fits(self, declared: DeclaredTensor, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() != len(declared.shape):
            return False
        named = zip(declared.shape, value.shape, strict=True)
        same = [n == (s if isinstance(s, int) else self.sizes.setdefault(s, n)) for s, n in named]
        return all(same) and str(value.dtype) == f"torch.{declared.dtype}"


class UnitCall:
    """A unit, with everything precomputed that is the same for each call.

    `takes` are ports with one block, `lists` ports with several. `only_here` are blocks that only
    one port of this unit reads, and no later unit. `weighs` is True while the sizes of its blocks
    are unknown. `is_plain`: it runs once, has no in-out ports and declares no tensors. `given` are
    all arguments of its function, without the blocks.
    """

    __slots__ = (
        *("unit", "name", "function", "params", "takes", "lists", "gives", "names", "inout"),
        *("only_read", "only_here", "frees", "map", "mapped", "tensors", "seed", "weighs"),
        *("is_plain", "given"),
    )

    def __init__(self, unit: Unit, function: Callable[..., Any]) -> None:
        self.unit, self.name, self.function = unit, unit.name, function
        self.params, self.tensors, self.frees = dict(unit.params), unit.tensors, unit.frees
        self.takes = [(port, many[0]) for port, many, is_list in unit.inputs if not is_list]
        self.lists = [(port, many) for port, many, is_list in unit.inputs if is_list]
        self.gives, self.names = unit.outputs, {name for name, _ in unit.outputs}
        self.inout = [(port, n) for port, n in self.takes if port in unit.inout]
        self.only_read = [port for port, _, _ in unit.inputs if port not in unit.inout]
        read = [n for _, many, _ in unit.inputs for n in many]
        self.only_here = {n for n in unit.frees if read.count(n) == 1}
        self.map = unit.map
        self.mapped = {n for port, n in self.takes if port in unit.map}
        self.seed = seed_of(unit.name) if unit.draws else None
        self.weighs = not unit.is_sized
        self.is_plain = not (unit.map or unit.inout or unit.tensors)
        self.given = dict.fromkeys(port for port, _ in (*self.takes, *self.lists)) | self.params


def items_of(port: str, value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        told = (
            f"{port!r} must be a list, because the node maps over it; got a {type(value).__name__}"
        )
        raise BadBlock(f"{told}: give it a list")
    return list(value)


def _versions(values: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors with their version, which grows with each write.

    Inference tensors have none.
    """
    return [(v, v._version) for v in values if type(v) is torch.Tensor and not v.is_inference()]


def _not_the_outputs(call: UnitCall, returned: object) -> str:
    wanted = ", ".join(sorted(call.names)) or "nothing"
    if not isinstance(returned, dict):
        return f"it returned a {type(returned).__name__}; a node returns a dict of {wanted}"
    given = ", ".join(map(repr, returned)) or "nothing"
    return f"it returned {given}; its outputs are {wanted}"


def _history(name: str) -> str:
    return f"{name!r} carries its autograd history: return {name}.detach()"


def _shown(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


# --- how large is it? -----------------------------------------------------------------------------


def weigh(value: Any, most: int) -> int | None:
    """Return the bytes of the tensors, numbers and texts in a value, also inside lists, tuples and
    dicts.

    Returns None if there is anything else, or if the value has more than `most` parts.
    """
    if type(value) in _TENSORS and not value.is_sparse:
        return int(value.nbytes)
    found, ahead = 0, [value]
    while ahead:
        most -= 1
        part = ahead.pop()
        if (type(part) in _TENSORS and not part.is_sparse) or type(part) is numpy.ndarray:
            found += part.nbytes
        elif isinstance(part, _PLAIN):
            found += len(part) if isinstance(part, str | bytes) else NUMBER_BYTES
        elif not isinstance(part, dict | list | tuple) or len(part) > most - len(ahead):
            return None
        else:
            ahead += dict.values(part) if isinstance(part, dict) else part
    return found


def _is_said(unit: Unit, port: str) -> bool:
    """True if the size of a port's block is declared.

    For a list only the size of an item is declared, so False.
    """
    return not unit.map and port in unit.tensors and unit.tensors[port].bytes is not None


# --- what holds what ------------------------------------------------------------------------------

_NOT_ENTERED = (
    *(types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size),
)


def parts_of(value: object) -> frozenset[object]:
    """Return everything inside a value that can be written to: storages and objects.

    Modules, classes and functions are left out, because a copy would share them anyway.
    """
    found, ahead = set[object](), [value]
    while ahead:
        part = ahead.pop()
        if isinstance(part, _NOT_ENTERED):
            continue
        if isinstance(part, torch.Tensor):
            found.add(("memory", part.untyped_storage().data_ptr()))
            ahead += [part.grad] if part.is_leaf and part.grad is not None else []
        elif isinstance(part, numpy.ndarray):
            found.add(("memory", _root(part).__array_interface__["data"][0]))
        elif id(part) not in found and _may_change(part):
            found.add(id(part))
            ahead += gc.get_referents(part)
    return frozenset(found)


def memory_of(value: object) -> Iterator[int]:
    """Return the addresses of a value's storages."""
    return (part[1] for part in parts_of(value) if isinstance(part, tuple))


def _may_change(part: object) -> bool:
    """True if the object may be written to.

    Objects that Python's collector does not track are constant, except bytearrays and dicts of
    plain values.
    """
    return gc.is_tracked(part) or isinstance(part, dict | bytearray)


def _root(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array
