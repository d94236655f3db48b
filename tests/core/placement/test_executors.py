"""A graph over several executors means what it means on one, however they overtake each other."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.graphs.task_graph import INPUT, Program, TaskGraph, Unit, parse, program
from app.core.placement.executors import (
    EVERYBODY,
    ExecutorPlan,
    ExecutorSpread,
    copies,
    executor_plans,
    part,
    spread,
)
from tests.core.model.graphs.test_task_graph import graph, node
from tests.thoroughness import examples

ITEMS = 5  # in a list that a plain node writes
MB = 1 << 20


# --- by hand ------------------------------------------------------------------------------------


def test_nodes_that_exchange_much_stay_on_one_executor() -> None:
    wide = {"y": {"dtype": "uint8", "shape": [64 * MB]}}
    body = graph(
        node("a1", "x=input:u", tensors=wide, est={"ms": 50}),
        node("b1", "x=a1.y", tensors=wide, est={"ms": 50}),
        node("a2", "x=input:u", tensors=wide, est={"ms": 50}),
        node("b2", "x=a2.y", tensors=wide, est={"ms": 50}),
        node("both", "x=b1.y z=b2.y", est={"ms": 5}),
    )
    found = spread(parse(body), 2)
    assert found.seats["a1"] == found.seats["b1"] != found.seats["a2"] == found.seats["b2"]
    passing = [copy for copy in copies(parse(body), found) if copy.block != "both.y"]
    assert [(c.block, c.bytes) for c in passing] in ([("b1.y", 64 * MB)], [("b2.y", 64 * MB)])


def test_shards_are_distributed_and_stay_where_they_are() -> None:
    body = graph(
        node("cut", "x=input:u", "parts"),
        node("each", "x=cut.parts", map="x"),
        node("again", "x=each.y", map="x"),
        node("sum", "xs=again.y"),
    )
    found = spread(parse(body), 3)
    assert (found.seats["each"], found.seats["again"]) == (EVERYBODY, EVERYBODY)
    passing = {(c.block, c.source, c.target) for c in copies(parse(body), found)}
    cut, total = found.seats["cut"], found.seats["sum"]
    others = [e for e in range(3) if e != cut]
    expected = {("cut.parts", cut, e) for e in others}
    expected |= {("again.y", e, total) for e in range(3) if e != total}
    expected |= {("sum.y", total, 0)} if total else set()
    assert passing == expected


def test_measured_sizes_decide_where_none_are_declared() -> None:
    """What reads a large block and a small one runs where the large one is."""

    def one(large: str, declared: int | None = None) -> tuple[str, list[tuple[str, int | None]]]:
        said = {"tensors": {"y": {"dtype": "uint8", "shape": [declared]}}} if declared else {}
        body = graph(
            node("left", "x=input:u", est={"ms": 50}, **said),
            node("right", "x=input:u", est={"ms": 50}),
            node("both", "x=left.y z=right.y", est={"ms": 5}),
        )
        made = {"left.y": 1000, "right.y": 1000, "both.y": 8} | {large: 64 * MB}
        known = replace(parse(body), made_bytes=made)
        found = spread(known, 2)
        assert found.seats["left"] != found.seats["right"]
        (beside,) = [n for n in ("left", "right") if found.seats[n] == found.seats["both"]]
        passed = [(c.block, c.bytes) for c in copies(known, found) if c.block != "both.y"]
        return beside, passed

    assert one("left.y") == ("left", [("right.y", 1000)])
    assert one("right.y") == ("right", [("left.y", 1000)])
    assert one("right.y", declared=99 * MB) == ("left", [("right.y", 64 * MB)])


def test_measured_list_is_sent_in_even_parts() -> None:
    item = {"tensors": {"y": {"dtype": "uint8", "shape": [7]}}}
    body = graph(
        node("cut", "x=input:u", "parts"),
        node("each", "x=cut.parts", map="x", **item),
        node("sum", "xs=each.y"),
    )
    known = replace(parse(body), made_bytes={"each.y": 3000, "cut.parts": 90})
    found = copies(known, spread(known, 3))
    assert {c.bytes for c in found if c.block == "each.y"} == {1000}
    assert {c.bytes for c in found if c.block == "cut.parts"} == {90}
    unknown = copies(parse(body), spread(parse(body), 3))
    assert {c.bytes for c in unknown if c.block == "each.y"} == {None}


def test_single_executor_receives_nothing() -> None:
    found = parse(graph(node("a", "x=input:u"), node("b", "x=a.y")))
    alone = spread(found, 1)
    assert alone.order == ("a", "b")
    assert copies(found, alone) == ()
    (plan,) = executor_plans(found, alone, program(found, alone.order))
    assert [stop.frees for stop in plan.stops] == [(0,), (1,)]


@pytest.mark.parametrize("total", range(12))
@pytest.mark.parametrize("executors", [1, 2, 3, 5])
def test_parts_are_even_and_complete(total: int, executors: int) -> None:
    parts = [part(total, e, executors) for e in range(executors)]
    assert [i for each in parts for i in each] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# --- properties ---------------------------------------------------------------------------------


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """With maps over lists of blocks and over lists that other nodes write, and in-out ports."""
    count = draw(st.integers(1, 10))
    nodes = []
    for n in range(count):
        sources = [f"n{m}.{o}" for m in range(n) for o in ("y", "z")] + ["input:u"]
        one = st.sampled_from(sources)
        reads = {p: draw(one) for p in draw(st.lists(st.sampled_from("ab"), unique=True))}
        body: dict[str, Any] = {"name": f"n{n}", "function": f"ops:f{n}", "outputs": ["y", "z"]}
        if draw(st.booleans()):
            reads["c"] = draw(st.one_of(one, st.lists(one, min_size=1, max_size=6)))
            body |= {"map": ["c"]} if draw(st.booleans()) else {}
        nodes.append({**body, "inputs": reads})
    outputs = draw(st.lists(st.sampled_from([f"n{m}.y" for m in range(count)]), min_size=1))
    return {"nodes": nodes, "outputs": {f"o{n}": block for n, block in enumerate(outputs)}}


def total_of(value: Any) -> int:
    return len(value) - 1 if value[0] == "list" else ITEMS


def item(value: Any, n: int) -> Any:
    return value[n + 1] if value[0] == "list" else ("item", n, value)


def called(unit: Unit, given: dict[str, Any], items: range | None) -> dict[int, Any]:
    """What a unit writes, as expressions; of a list the items of that range, in the same form."""

    def one(n: int | None) -> dict[str, Any]:
        return {p: item(v, n) if n is not None and p in unit.map else v for p, v in given.items()}

    def said(output: str, n: int | None) -> Any:
        return unit.function, output, tuple(sorted(one(n).items()))

    if items is None:
        return {n: said(output, None) for output, n in unit.outputs}
    return {n: ("list", *(said(output, i) for i in items)) for output, n in unit.outputs}


def alone(found: Program) -> dict[str, Any]:
    blocks: dict[int, Any] = {
        n: (name,) for n, name in enumerate(found.blocks) if name.startswith(INPUT)
    }
    for unit in found.units:
        taken = {
            port: ("list", *(blocks[n] for n in many)) if is_list else blocks[many[0]]
            for port, many, is_list in unit.inputs
        }
        total = range(total_of(taken[unit.map[0]])) if unit.map else None
        blocks |= called(unit, taken, total)
    return {port: blocks[n] for port, n in found.outputs.items()}


class Executor:
    """One plan, played: what lies there, and what is posted for others."""

    def __init__(
        self, plan: ExecutorPlan, found: Program, posts: dict[tuple[int, int], Any]
    ) -> None:
        self.plan, self.program, self.posts = plan, found, posts
        inputs = (n for n, name in enumerate(found.blocks) if name.startswith(INPUT))
        self.own: dict[int, Any] = {n: (found.blocks[n],) for n in inputs}
        self.taken: dict[tuple[int, int], Any] = {}
        self.totals: dict[int, int] = {}
        self.done = 0

    def can_go_on(self) -> bool:
        stops = self.plan.stops
        return self.done < len(stops) and self._are_there(stops[self.done].takes)

    def _are_there(self, takes: tuple[tuple[int, int], ...]) -> bool:
        return all(held in self.taken or held in self.posts for held in takes)

    def value(self, n: int, spread: ExecutorSpread, *, own_part: bool) -> Any:
        """As a whole, or as the part of it that was made here, if it was dealt out."""
        maker = next((u for u in self.program.units if n in dict(u.outputs).values()), None)
        if maker is None or spread.seats[maker.name] != EVERYBODY or own_part:
            return self.own[n] if n in self.own else self._of(n)
        parts = [
            self.own[n] if e == self.plan.executor else self.taken[n, e]
            for e in range(spread.executors)
        ]
        return ("list", *(value for each in parts for value in each[1:]))

    def _of(self, n: int) -> Any:
        (value,) = (value for held, value in self.taken.items() if held[0] == n)
        return value

    def go_on(self, found: ExecutorSpread) -> None:
        stop = self.plan.stops[self.done]
        self.done += 1
        unit, me, among = self.program.units[stop.at], self.plan.executor, found.executors
        self.take(stop.takes)
        given, items = dict[str, Any](), None
        for port, many, is_list in unit.inputs:
            if port not in unit.map:
                values = [self.value(n, found, own_part=False) for n in many]
                given[port] = ("list", *values) if is_list else values[0]
                continue
            if is_list:
                mine, total = part(len(many), me, among), len(many)
                values = [self.value(many[i], found, own_part=False) for i in mine]
                given[port] = ("list", *([None] * mine.start), *values)
            elif many[0] in self.totals:
                total = self.totals[many[0]]
                whole = any((many[0], e) in stop.takes for e in range(among))
                own = self.value(many[0], found, own_part=not whole)
                before = [None] * (0 if whole else part(total, me, among).start)
                given[port] = ("list", *before, *own[1:])
            else:
                given[port] = self.value(many[0], found, own_part=False)
                total = total_of(given[port])
            items = part(total, me, among)
            self.totals |= dict.fromkeys((n for _, n in unit.outputs), total)
        self.own |= called(unit, given, items)
        for n in stop.gives:
            self.posts[n, me] = self.own[n]
        for n in stop.frees:
            del self.own[n]
        for n, e in stop.drops:
            self.taken.pop((n, e), None)
            if e == me:
                del self.own[n]  # who reads it later reads what was posted

    def take(self, takes: tuple[tuple[int, int], ...]) -> None:
        self.taken |= {held: self.posts[held] for held in takes if held not in self.taken}


def together(found: Program, spread: ExecutorSpread, graph_: TaskGraph, dice: random.Random) -> Any:
    posts = dict[tuple[int, int], Any]()
    executors = [Executor(plan, found, posts) for plan in executor_plans(graph_, spread, found)]
    while any(e.done < len(e.plan.stops) for e in executors):
        dice.choice([e for e in executors if e.can_go_on()]).go_on(spread)
    first = executors[0]
    first.take(first.plan.takes)
    outputs = {port: first.value(n, spread, own_part=False) for port, n in found.outputs.items()}
    wanted = {n for n in outputs and found.outputs.values()}
    inputs = {n for n, name in enumerate(found.blocks) if name.startswith(INPUT)}
    for executor in executors:  # nobody keeps what nobody needs
        assert executor.own.keys() <= wanted | inputs
        assert not executor.taken or executor is first
    return outputs


@settings(max_examples=examples(100))
@given(bodies(), st.integers(2, 4), st.randoms(use_true_random=False), st.booleans())
def test_outputs_are_the_same_however_executors_overtake_each_other(
    body: dict[str, Any], executors: int, dice: random.Random, planned: bool
) -> None:
    found = parse(body)
    whose = spread(found, executors) if planned else anyhow(found, executors, dice)
    ordered = program(found, whose.order)
    assert together(ordered, whose, found, dice) == alone(ordered)


def anyhow(found: TaskGraph, executors: int, dice: random.Random) -> ExecutorSpread:
    seats = {n.name: EVERYBODY if n.map else dice.randrange(executors) for n in found.nodes}
    return ExecutorSpread(executors=executors, order=program(found).order, seats=seats)
