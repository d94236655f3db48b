"""Runs the plan of one executor, in a graph that several executors run: its own nodes, in the
common order.

The executors are the ranks of a gang, in processes of their own, and each knows the whole plan
(`app.core.placement.executors`). So an executor need not ask another executor between two nodes. An
executor runs its nodes strictly in order, waits until the blocks that they read are posted, and
posts blocks that other executors read (`shared_blocks`).

*Late inputs* of the graph come to the first executor, which posts them like blocks of its own. It
also gives the graph's outputs to the outside as soon as they are made (`PartitionLink`).

*The image* of an executor holds the blocks that it made and that any executor still needs. Blocks
of other executors are not in it: their makers post them again. So each executor may be stopped
before any of its nodes. The point at which an executor stops is its *cut*. An executor at its cut
frees no more blocks. Otherwise an executor whose image is already made could run on and drop blocks
that the other's image then lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from app.core.model.graphs.task_graph import INPUT, TaskGraph, Unit
from app.core.placement.executors import EVERYBODY, ExecutorSpread, Stop, executor_plans, part
from workers.capture.capture import Surroundings
from workers.graph import runner
from workers.graph.remote_blocks import RemoteBlockTable
from workers.graph.runner import GraphJob, Loaded, UnitCall, items_of, memory_of
from workers.graph.shared_blocks import BlockTable, Held
from workers.hardware.accelerator import Accelerator
from workers.ranks.turns import Turns

JSON = dict[str, Any]


class PartitionLink(Protocol):
    """Connects the first executor of a partition with all that lies outside its gang."""

    @property
    def fd(self) -> int:
        """The descriptor on which news arrives."""

    def look(self) -> None:
        """Take the late inputs that have arrived, and give out the outputs that are ready."""

    def has_news(self) -> bool:
        """True if `look` or `waits` has something to do, or the executor must stop."""

    def must_stop(self) -> bool:
        """True if no node may begin until this process is trusted again."""

    def waits(self) -> None:
        """Act if the next node has been waiting for too long."""

    def runs(self) -> None:
        """Note that the next node can run."""


class LoadedExecutor(Loaded):
    """Holds a graph and its functions, ready for one executor to begin or to continue."""

    def __init__(
        self,
        body: JSON | TaskGraph,
        find: Callable[[str], Callable[..., Any]],
        accelerator: Accelerator,
        *,
        spread: ExecutorSpread,
        turns: Turns,
        around: Surroundings,
        late: Sequence[str] = (),
        is_part: bool = False,
        budget_bytes: int = 0,
        host_bytes: int = sys.maxsize,
    ) -> None:
        """Load the plan; the limits are those of `Loaded`, for each executor.

        If the graph `is_part` of another one, other parts take its outputs while it runs.
        """
        self.turns, self.around, self.accelerator = turns, around, accelerator
        self.is_part = is_part
        super().__init__(
            *(body, find, accelerator),
            late=late,
            budget_bytes=budget_bytes,
            host_bytes=host_bytes,
        )
        self.lay(spread)

    def lay(self, spread: ExecutorSpread) -> None:
        """Set the order of the nodes and the executor of each."""
        self.spread = spread
        self.order(spread.order)
        self.plan = executor_plans(self.graph, spread, self.program, self.late)[self.turns.rank]
        units = self.program.units
        self.comes = [self.program.blocks.index(f"{INPUT}{port}") for port in self.late]
        self.maker = {n: spread.seats[unit.name] for unit in units for _, n in unit.outputs}
        self.maker |= dict.fromkeys(self.comes, 0)
        self.calls = [self._call(stop) for stop in self.plan.stops]

    def _call(self, stop: Stop) -> ExecutorCall:
        unit = replace(self.program.units[stop.at], frees=stop.frees)
        return ExecutorCall(unit, self.functions[unit.function], stop, self.maker)

    def begin(self, inputs: JSON) -> ExecutorJob:
        lacks = [port for port in self.late if port not in inputs]
        there = {f"{INPUT}{port}": inputs.pop(port) for port in self.ports if port not in lacks}
        if self.turns.rank:  # the first executor passes these inputs on
            lacks, late = [], {f"{INPUT}{port}" for port in self.late}
            there = {name: value for name, value in there.items() if name not in late}
        return ExecutorJob(self, {"blocks": there, "lacks": lacks})

    def go_on(self, state: JSON) -> ExecutorJob:
        before = ExecutorSpread(**state["spread"])
        if before != self.spread:  # another version of Roundhouse has computed another plan
            self.lay(before)
        return ExecutorJob(self, state)


class ExecutorCall(UnitCall):
    """Describes a call that reads blocks of other executors.

    `whole` are ports with a block that another executor made. `others` are the remaining ports with
    one block that are not mapped.
    """

    __slots__ = ("others", "whole")

    def __init__(
        self, unit: Unit, function: Callable[..., Any], stop: Stop, maker: Mapping[int, int]
    ) -> None:
        super().__init__(unit, function)
        taken = {n: (n, whose) for n, whose in stop.takes if maker.get(n) == whose}
        self.only_here -= {n for n, _ in stop.takes}
        takes = [(port, n) for port, n in self.takes if port not in self.map]
        self.whole = [(port, taken[n]) for port, n in takes if n in taken]
        self.others = [(port, n) for port, n in takes if n not in taken]


class ExecutorJob(GraphJob):
    """Tracks the progress of one executor: it is past the first `done` stops of its plan.

    `held` are blocks that were made here or given to the task, and are still read here. `taken` are
    blocks of other executors. For a list of which only a part is here, `totals` has the whole
    length.
    """

    def __init__(self, loaded: LoadedExecutor, state: JSON) -> None:
        super().__init__(loaded, state)
        self.spread, self.plan, self.maker = loaded.spread, loaded.plan, loaded.maker
        self.me, self.end = loaded.plan.executor, len(self.program.units)
        self.total = state.get("total", 0)
        self.totals: dict[int, int] = dict(state.get("totals", {}))
        self.held = {n for n, name in enumerate(self.program.blocks) if name in state["blocks"]}
        self.taken: dict[Held, Any] = {}
        # what its last node made, to be weighed later
        self.unweighed: tuple[UnitCall, JSON, float] | None = None
        # the result with which a node of this executor finished the graph early
        self.result: JSON | None = None
        passing = RemoteBlockTable if loaded.turns.arena.is_bridged else BlockTable
        self.passing = passing(
            loaded.turns, len(self.program.blocks) + 1, loaded.around, loaded.accelerator
        )
        # outputs of the graph that are there, at the first executor
        self.results = dict[str, Any]()
        self.parts = {
            port: [held for held in self.plan.takes if held[0] == n]
            for port, n in self.program.outputs.items()
        }
        if loaded.is_part and not self.me:
            for held in self.plan.takes:
                self.passing.want(held)
        self._set_first()
        for n in loaded.comes:
            if n in self.held:
                self._post_input(n)
        if "spread" in state:
            self.passing.passed_bytes = dict(state["passed"])
            self._post_again(state["result"])

    def _post_again(self, result: JSON | None) -> None:
        """Post this executor's blocks again after a restore, and drop unneeded blocks."""
        over = self.plan.stops[: self.done]
        for n in (n for stop in over for n in stop.gives if n in self.held):
            self.blocks[n] = self.passing.post(n, self.blocks[n], self.plan.readers[n])
        for held in (held for stop in over for held in stop.drops):
            self._let_go(held)
        if result is not None:
            self._finish_early(result, self._next_at())

    def stand(self) -> None:
        """Free dropped blocks. Called before the other executors learn that this one is at
        its cut.
        """
        self.passing.reclaim()

    def state(self) -> JSON:
        """Return the progress, and all blocks that any executor at the same cut may need."""
        count = len(self.program.blocks)
        given = {n: value for n, value in self.passing.values().items() if n < count}
        return {
            "spread": asdict(self.spread),
            "lacks": list(self.lacks.values()),
            "total": self.total,
            "totals": self.totals,
            "result": self.result,
            "passed": self.passing.passed_bytes,
            **self._state(given | {n: self.blocks[n] for n in self.held}),
        }

    def passed(self) -> list[list[Any]]:
        """Return the blocks taken from other executors: [block, executor, bytes]."""
        names, taken = self.program.blocks, self.passing.passed_bytes
        return [[names[n], e, size] for (n, e), size in taken.items() if n < len(names)]

    # --- where it is ---

    def _next_at(self) -> int:
        stops = self.plan.stops
        return stops[self.done].at if self.done < len(stops) else self.end

    @property
    def _is_at_end(self) -> bool:
        """True if this executor will run no further node."""
        if self.result is not None or self._next_at() == self.end:
            return True
        early = self.passing.early
        return early is not None and self._next_at() > early[0]

    # --- before a step ---

    def await_next(self, outside: PartitionLink | None = None) -> bool:
        """Wait until the next node can run; False if all executors must stop before that."""
        passing = self.passing
        while True:
            if outside is not None:
                outside.look()
            if self._is_ready():
                break
            if passing.turns.is_called() or (outside is not None and outside.must_stop()):
                return False
            if outside is None:
                self._wait(passing.early)
            else:
                self._wait_outside(passing.early, outside)
        if outside is not None:
            outside.runs()
        return True

    def _wait(self, early: Held | None) -> None:
        """Wait until the next node may be ready, or until the graph ended at an earlier place than
        `early`.
        """
        self._tell_passed()
        self.passing.wait(
            self._missing(),
            lambda: self._is_ready() or self.passing.early != early,
            self._waits_for(),
        )

    def _wait_outside(self, early: Held | None, outside: PartitionLink) -> None:
        """Wait like `_wait`, and also return on news from outside or when an output is ready to
        give out.
        """
        outside.waits()

        def is_enough() -> bool:
            news = outside.has_news() or self.has_new_outputs
            return news or self._is_ready() or self.passing.early != early

        self._tell_passed()
        fd = outside.fd if self.lacks else None
        self.passing.wait(self._missing(), is_enough, self._waits_for(), outside=fd)

    def _tell_passed(self) -> None:
        if self._is_at_end:
            self.passing.tell_passed(self.end if self.result is not None else self._next_at())

    def _is_ready(self) -> bool:
        if self.passing.is_over:
            return True
        if not self._is_at_end:
            return self.awaited() is None and self._missing() is None
        early = self.passing.early
        if self.me or not self.passing.all_passed(self.end - 1 if early is None else early[0]):
            return False
        return self._missing_at_end() is None

    def _missing(self) -> Held | None:
        """Return a block that the next node reads and that has not been posted, if any."""
        if self._is_at_end:
            return self._missing_at_end()
        takes = self.plan.stops[self.done].takes
        return next(
            (h for h in takes if h not in self.taken and not self.passing.is_there(h)), None
        )

    def _missing_at_end(self) -> Held | None:
        """Return an output that the first executor lacks.

        Outputs of other hosts may arrive after all nodes have run.
        """
        if self.me:
            return None
        early = self.passing.early
        takes = self.plan.takes if early is None else ((len(self.program.blocks), early[1]),)
        return next((h for h in takes if not self.passing.is_there(h)), None)

    def _comes_soon(self) -> bool:
        """Poll for the next node's blocks for a moment; True if they come.

        Polling is faster than sleeping.
        """
        if self.awaited() is not None:
            return False
        stop, passing = self.plan.stops[self.done], self.passing
        return all(passing.is_there(held) or passing.is_soon(held) for held in stop.takes)

    def _waits_for(self) -> str:
        missing = self._missing()
        if missing is None and not self._is_at_end:
            return f"the input {self.awaited()}"
        if missing is None:
            return "the end of the graph"
        return f"{self.program.blocks[missing[0]]} of executor {missing[1]}"

    # --- a step ---

    def step(self, ctx: Any) -> None:
        """Run at least one node, then more until BURST_S has passed or a node has to wait."""
        if self.passing.is_over or self._is_at_end:
            self._end(ctx)
            return
        until_s = runner._clock() + runner.BURST_S
        while self._one(ctx, until_s) and self._goes_on(ctx, until_s):
            if self._is_at_end or not self._comes_soon():
                break
        if ctx.result is not None:
            result, ctx.result = ctx.result, None
            self._finish_early(result, self.plan.stops[self.done].at)

    def _one(self, ctx: Any, until_s: float) -> bool:
        """Run the next node, or some of its shards; True if the node is complete."""
        stop, call = self.plan.stops[self.done], self.calls[self.done]
        for held in stop.takes:
            if held not in self.taken:
                self.taken[held] = self.passing.take(held)
        if not self._node(ctx, call, until_s):
            return False
        if ctx.result is None:
            self._did(stop, call)
        if self.unweighed is not None:
            super()._weigh(*self.unweighed)
            self.unweighed = None
        return ctx.result is None

    def _run(self, ctx: Any, call: UnitCall) -> None:
        if not call.is_plain or self.room is not None:
            super()._run(ctx, call)
            return
        given = self._filled(call, call.given.copy())
        self._plain(ctx, call, self.done, given, runner._clock())

    def _did(self, stop: Stop, call: UnitCall) -> None:
        for n in stop.gives:  # done first, because other executors wait
            self.blocks[n] = self.passing.post(n, self.blocks[n], self.plan.readers[n])
            if self.end in self.plan.readers[n].values():  # an output of the graph
                self.passing.call_first()
        for _, n in call.gives:
            self.held.add(n)
        self.held.difference_update(stop.frees)
        for held in stop.drops:
            self._let_go(held)
        self.done += 1

    def _let_go(self, held: Held) -> None:
        """Drop a block of another executor. A block made here is dropped when no other executor
        needs it.
        """
        n, whose = held
        if whose == self.me:
            self.held.discard(n)
            self.blocks[n] = None
        self.taken.pop(held, None)
        if whose != self.me or n in self.passing.posted:
            self.passing.drop(held)

    def _finish_early(self, result: JSON, at: int) -> None:
        self.result = result
        self.passing.post(len(self.program.blocks), result, (0,))
        self.passing.end_early(at)

    def _end(self, ctx: Any) -> None:
        """Finish the job. The first executor returns the graph's outputs; the others return
        nothing.
        """
        if self.me:
            ctx.finish({})
            return
        early = self.passing.early
        if early is not None:
            ctx.finish(self.passing.take((len(self.program.blocks), early[1])))
        else:
            self.made()
            ctx.finish({port: self.results[port] for port in self.program.outputs})
        self.passing.end()

    # --- to and from outside ---

    def take(self, port: str, value: Any) -> None:
        """Accept a late input, and pass it on."""
        n = next(n for n, lacked in self.lacks.items() if lacked == port)
        super().take(port, value)
        self.held.add(n)
        self._post_input(n)

    def _post_input(self, n: int) -> None:
        if readers := self.plan.readers.get(n):
            self.blocks[n] = self.passing.post(n, self.blocks[n], readers)
        if not any(n in many for call in self.calls for _, many, _ in call.unit.inputs):
            self._let_go((n, self.me))

    def lacked(self) -> str | None:
        """Return the late input for which the graph waits, if any.

        It is the missing input that the plan needs first. If no executor can run, all of them wait
        for it, since all nodes before its first reader have run.
        """
        return next(iter(self.lacks.values()), None)

    @property
    def stands_still(self) -> bool:
        """True if no other executor can run until the first one posts a block."""
        return self.passing.others_are_still

    def made(self) -> JSON:
        """Return the outputs, by port, that have come to the first executor since the last call."""
        new = {}
        for port, n in list(self._new_outputs()):
            takes = (held for held in self.parts[port] if held not in self.taken)
            self.taken |= {held: self.passing.take(held) for held in takes}
            new[port] = self._value(n)
        self.results |= new
        return new

    @property
    def has_new_outputs(self) -> bool:
        """True if outputs are there that `made` has not returned."""
        return next(self._new_outputs(), None) is not None

    def _new_outputs(self) -> Iterator[tuple[str, int]]:
        """Yield the complete outputs that `made` has not returned yet, by port and number."""
        if self.me:
            return
        for port, n in self.program.outputs.items():
            if port in self.results:
                continue
            has_part = self.maker[n] in (self.me, EVERYBODY)
            is_made = not has_part or self.maker_at[n] < self._next_at()
            if is_made and all(map(self.passing.is_there, self.parts[port])):
                yield port, n

    # --- values ---

    def _value(self, n: int) -> Any:
        """Return a whole block, no matter which executors made it."""
        maker = self.maker.get(n, self.me)
        if maker != EVERYBODY:
            return self.blocks[n] if maker == self.me else self.taken[n, maker]
        parts = (
            self.blocks[n] if e == self.me else self.taken[n, e]
            for e in range(self.spread.executors)
        )
        return [item for each in parts for item in each]

    def _weigh(self, call: UnitCall, returned: JSON, took_s: float) -> None:
        """Postpone weighing, because other executors wait for the blocks."""
        self.unweighed = call, returned, took_s

    def _given(self, call: UnitCall) -> JSON:
        """Return the node's inputs, in the order in which a single executor would give them.

        Lists to map over are added later.
        """
        return self._filled(call, dict.fromkeys(port for port, _ in (*call.takes, *call.lists)))

    def _filled(self, call: UnitCall, given: JSON) -> JSON:
        """Fill in all inputs of the node except the lists that it maps over."""
        assert isinstance(call, ExecutorCall)
        for port, held in call.whole:
            given[port] = self.taken[held]
        for port, n in call.others:
            given[port] = self._value(n)
        for port, many in call.lists:
            if port not in call.map:
                given[port] = [self._value(n) for n in many]
        return given

    def _open(self, call: UnitCall) -> None:
        super()._open(call)
        self._set_first()
        lists = {n for port, n in call.takes if port in call.map}
        self.held -= lists & call.only_here
        self.held.update(n for _, n in call.gives)
        self.totals |= dict.fromkeys((n for _, n in call.gives), self.total)

    def _set_first(self) -> None:
        self.first = part(self.total, self.me, self.spread.executors).start

    def _mapped(self, call: UnitCall) -> dict[str, tuple[list[Any], int]]:
        """Return the items of this executor's part of the lists to map over.

        Items that shards made are already here.
        """
        taken = {n for n, _ in self.plan.stops[self.done].takes}
        found = dict[str, tuple[list[Any], int]]()
        for port, n in call.takes:
            if port in call.map and n in self.totals and n not in taken:
                found[port] = list(self.blocks[n]), self.totals[n]
            elif port in call.map:
                items = items_of(port, self._value(n))
                found[port] = [items[i] for i in self._part(len(items))], len(items)
        for port, many in call.lists:
            if port in call.map:
                found[port] = [self._value(many[i]) for i in self._part(len(many))], len(many)
        return found

    def _part(self, total: int) -> range:
        return part(total, self.me, self.spread.executors)

    def _in_all(self, here: int) -> int:
        return self.total

    def _is_shared(self, n: int) -> bool:
        """True if the block is in the heap, where other executors may read it, or overlaps another
        block.
        """
        return any(
            map(self.passing.arena.is_land, memory_of(self.blocks[n]))
        ) or super()._is_shared(n)
