"""A graph cut for several islands: its partitions, and partitions as tasks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as Profile
from hypothesis import strategies as st

from app.core.model.descriptor import BadDescriptor, Descriptor, RunSpec, Source, parse
from app.core.model.graphs import dependencies as request_graph
from app.core.model.graphs import task_graph
from app.core.model.graphs.task_graph import INPUT, Node, TaskGraph, known_bytes
from app.core.placement import partitions as subject
from app.core.placement.partitions import Partition, cut, expanded, of_run, part
from benchmarks.two_islands import pipeline
from tests.thoroughness import examples

JSON = dict[str, Any]
SPEED = 10**9
MB = 1 << 20


def node(name: str, *reads: str, ms: float = 1000.0, **more: Any) -> JSON:
    inputs = {f"x{n}": block for n, block in enumerate(reads)}
    body = {"name": name, "function": "m:f", "inputs": inputs, "outputs": ["o"], "est": {"ms": ms}}
    return {**body, **more}


def graph(*nodes: JSON, **outputs: str) -> TaskGraph:
    return task_graph.parse({"nodes": list(nodes), "outputs": outputs})


def two_chains(length: int = 3) -> TaskGraph:
    """Two of them that meet at the end."""
    nodes = [
        node(f"{side}{n}", f"{side}{n - 1}.o" if n else "input:raw")
        for side in "lr"
        for n in range(length)
    ]
    join = node("join", f"l{length - 1}.o", f"r{length - 1}.o", ms=1)
    return graph(*nodes, join, y="join.o")


def random_graph(seed: int) -> TaskGraph:
    draw = random.Random(seed)
    nodes = []
    for n in range(draw.randint(2, 14)):
        others = draw.sample(range(n), min(n, draw.randint(0, 3)))
        reads = [f"n{other}.o" for other in others] or ["input:raw"]
        nodes.append(node(f"n{n}", *reads, ms=draw.choice((1.0, 300.0, 900.0))))
    ends = {f"y{n}": f"n{n}.o" for n in draw.sample(range(len(nodes)), 2)}
    return graph(*nodes, **ends)


def run(whole: TaskGraph, given: dict[str, str]) -> dict[str, str]:
    """What a graph gives whose nodes write down what they were given."""
    blocks = {f"{INPUT}{port}": value for port, value in given.items()}
    by_name = {node.name: node for node in whole.nodes}
    for name in task_graph.order(whole):
        blocks[f"{name}.o"] = written(by_name[name], blocks)
    return {port: blocks[block] for port, block in whole.outputs.items()}


def written(one: Node, blocks: dict[str, str]) -> str:
    read = ",".join(blocks[s] for taken in one.inputs.values() for s in taken.sources)
    return f"{one.name}({read})"


def run_all(whole: TaskGraph, cuts: tuple[Partition, ...], given: dict[str, str]) -> dict[str, str]:
    """Run all partitions at once, each its nodes in its order."""
    islands = Islands(whole, given)
    lines = [[(mine, name) for name in mine.nodes] for mine in cuts]
    while any(lines):
        ran = [line for line in lines if line and islands.ran(*line[0])]
        assert ran, "all wait for each other"
        for line in ran:
            del line[0]
    return {port: islands.made[port] for mine in cuts for port in mine.ends}


@dataclass
class Islands:
    whole: TaskGraph
    given: dict[str, str]
    made: dict[str, str] = field(default_factory=dict)
    held: dict[int, dict[str, str]] = field(default_factory=dict)

    def ran(self, mine: Partition, name: str) -> bool:
        """Run a node if its partition could begin, and all that it reads is there."""
        if {*mine.takes} - {*mine.late} - {*self.made}:
            return False
        (one,) = [one for one in part(self.whole, mine.as_json()).nodes if one.name == name]
        held = self.held.setdefault(mine.number, {})
        there = {f"{INPUT}{port}": value for port, value in {**self.given, **self.made}.items()}
        if {*one.reads} - {*there, *held}:
            return False
        block = f"{name}.o"
        held[block] = value = written(one, {**there, **held})
        gives = mine.as_json()["gives"].items()
        self.made |= {port: value for port, given in gives if given == block}
        return True


# --- the cut --------------------------------------------------------------------------------------


def test_wide_graph_is_cut_where_the_fewest_bytes_cross() -> None:
    cuts = cut(two_chains(), 2, 1, bytes_per_s=SPEED)
    assert {mine.number for mine in cuts} == {0, 1}
    assert sorted(len(mine.nodes) for mine in cuts) == [3, 4]
    assert sum(len(mine.takes) for mine in cuts) == 1  # into the join


def test_a_chain_stays_whole() -> None:
    chain = graph(node("a"), node("b", "a.o"), node("c", "b.o"), y="c.o")
    (one,) = cut(chain, 2, 1, bytes_per_s=SPEED)
    assert (one.nodes, one.takes, one.gives, one.ends) == (("a", "b", "c"), {}, {}, {"y": "c.o"})


def test_graph_is_not_cut_where_sending_takes_longer() -> None:
    declared = {"tensors": {"o": {"dtype": "uint8", "shape": [10**10]}}}
    wide = graph(
        node("a", **declared), node("b", "a.o"), node("c", "a.o"), node("d", "b.o", "c.o"), y="d.o"
    )
    assert len(cut(wide, 2, 1, bytes_per_s=SPEED)) == 1


def cuts_of(whole: TaskGraph, seats: dict[str, int], executors: int = 1) -> tuple[Partition, ...]:
    """With the partitions given."""
    order = task_graph.order(whole)
    planned = {p: [n for n in order if seats[n] == p] for p in {*seats.values()}}
    return subject._Cut(whole, planned, executors).found()


def test_a_partition_begins_when_its_first_inputs_are_there_and_takes_the_others_late() -> None:
    """Forward and backward through two stages."""
    pipe = graph(
        node("f0"), node("f1", "f0.o"), node("b1", "f1.o"), node("b0", "b1.o", "f0.o"), y="b0.o"
    )
    first, other = cuts_of(pipe, {"f0": 0, "b0": 0, "f1": 1, "b1": 1})
    assert (first.number, first.nodes) == (0, ("f0", "b0"))
    assert (other.number, other.nodes) == (1, ("f1", "b1"))
    assert first.late == tuple(first.takes) == tuple(other.gives)
    assert first.as_json()["late"] == [*first.late]
    assert [*other.takes.values()] == ["f0.o"]
    assert other.late == ()


@pytest.mark.parametrize("executors", [1, 2])
def test_waits_inside_a_partition_count_for_the_makespan(executors: int) -> None:
    seats = dict(l0=0, l1=0, l2=0, r0=1, r1=1, r2=1, join=0)
    first, other = cuts_of(two_chains(), seats, executors)
    assert first.nodes == ("l0", "l1", "l2", "join")
    assert first.late == tuple(first.takes) == tuple(other.gives)
    assert first.ms == 3001 / executors + subject.GIVE_MS  # for so long join waits for r2
    assert other.ms == 3000 / executors


@pytest.mark.parametrize("ms", [20, 80, 200])
def test_pipeline_becomes_one_partition_on_each_island(ms: float) -> None:
    """Four micro-batches keep both islands busy but for moments."""
    times = {"forward": ms, "last": 3 * ms, "back": 2 * ms}
    short = dict.fromkeys(("weights", "batch", "change"), 20.0) | {"norms": 5.0}
    whole = task_graph.parse(pipeline(times | short))
    cuts = cut(whole, 2, 1, bytes_per_s=SPEED)
    assert [mine.number for mine in cuts] == [0, 1]
    assert all(mine.late for mine in cuts)
    takes = {name: mine.number for mine in cuts for name in mine.takes}
    assert {*takes} <= {n for mine in cuts for n in mine.gives if mine.number != takes[n]}
    busy_ms = sum(one.est_ms for mine in cuts for one in whole.nodes if one.name in mine.nodes) / 2
    assert busy_ms < max(mine.ms for mine in cuts) < busy_ms + 1000


def test_node_that_waits_inside_a_partition_ends_later() -> None:
    """b waits for a1, and c takes what b gives."""
    pipe = graph(
        node("a0", ms=100),
        node("a1", "a0.o"),
        node("b0", "a0.o", ms=800),
        node("b1", "b0.o", "a1.o", ms=100),
        node("a2", "a1.o", "b1.o"),
        y="a2.o",
    )
    first, other = cuts_of(pipe, {"a0": 0, "a1": 0, "a2": 0, "b0": 1, "b1": 1})
    waits_ms = 1000 - 800 - subject.LAUNCH_MS
    assert [*other.after_ms.values()] == [900 + waits_ms + subject.GIVE_MS]
    assert other.ms == 900 + waits_ms
    assert [len(mine.late) for mine in (first, other)] == [1, 1]


@pytest.mark.parametrize("executors", [1, 2])
def test_block_for_another_partition_is_sent_while_its_maker_runs(executors: int) -> None:
    pipe = graph(
        node("a0"), node("a1", "a0.o"), node("b", "a0.o"), node("a2", "a1.o", "b.o"), y="a2.o"
    )
    first, other = cuts_of(pipe, {"a0": 0, "a1": 0, "b": 1, "a2": 0}, executors)
    block = {giver: output for output, giver in first.gives.items()}
    after_ms = 1000 / executors + subject.GIVE_MS
    assert first.after_ms == {block["a0.o"]: after_ms}
    assert [*other.after_ms.values()] == [after_ms]


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 3))
@Profile(max_examples=examples(150), deadline=None)
def test_partitions_give_what_the_whole_graph_gives_for_any_cut(
    seed: int, count: int, executors: int
) -> None:
    whole, draw = random_graph(seed), random.Random(seed)
    seats = {one.name: draw.randrange(count) for one in whole.nodes}
    cuts = cuts_of(whole, seats, executors)
    assert sorted(name for mine in cuts for name in mine.nodes) == sorted(seats)
    assert all({seats[name] for name in mine.nodes} == {mine.number} for mine in cuts)
    made = set[str]()
    for mine in cuts:
        assert {*mine.takes} - {*mine.late} <= made
        assert {*mine.late} <= {*mine.takes}
        made |= {*mine.gives}
    assert run_all(whole, cuts, {"raw": "raw"}) == run(whole, {"raw": "raw"})


@given(st.integers(0, 10**6))
@Profile(max_examples=examples(50), deadline=None)
def test_late_inputs_are_in_the_order_in_which_they_are_needed(seed: int) -> None:
    """A gang that stands still leaves for the first one: the others may depend on what follows."""
    whole, draw = random_graph(seed), random.Random(seed)
    cuts = cuts_of(whole, {one.name: draw.randrange(3) for one in whole.nodes})
    by_name = {one.name: one for one in whole.nodes}
    for mine in cuts:
        first = {
            port: next(n for n, name in enumerate(mine.nodes) if block in by_name[name].reads)
            for port, block in mine.takes.items()
        }
        assert [first[port] for port in mine.late] == sorted(first[port] for port in mine.late)


# --- partitions as tasks --------------------------------------------------------------------------


def request(**more: Any) -> JSON:
    wide = {
        "name": "wide",
        "run": {"graph": "sha256:" + "0" * 64},
        "inputs": {"raw": "make.x"},
        "outputs": ["y"],
        "islands": 2,
        **more,
    }
    make = {"name": "make", "run": {"function": "m:make"}, "outputs": ["x"]}
    use = {"name": "use", "run": {"function": "m:use"}, "inputs": {"y": "wide.y"}}
    last = {"name": "last", "run": {"function": "m:use"}, "start": {"after": ["wide"]}}
    return {"bundle": "sha256:" + "1" * 64, "tasks": [make, wide, use, last]}


def cut_up(**more: Any) -> tuple[Descriptor, list[str]]:
    seats = dict(l0=0, l1=0, l2=0, r0=1, r1=1, r2=1, join=0)
    cuts = cuts_of(two_chains(), seats, executors=2)
    found, faults = expanded(parse(request(**more)), {"wide": cuts})
    return found, [fault.pointer for fault in faults]


def test_partitions_take_the_place_of_their_task() -> None:
    found, faults = cut_up(publish={"y": "result"}, retry={"max": 2}, start={"after": ["make"]})
    assert faults == []
    tasks = {task.name: task for task in found.tasks}
    mine = [name for name in tasks if name.startswith("wide.")]
    assert mine == ["wide.0", "wide.1"]
    assert not request_graph.check(found)
    assert {tasks[name].retry.max for name in mine} == {2}
    assert all("make" in tasks[name].start.after for name in mine)
    assert set(tasks["last"].start.after) == {*mine}
    giver = tasks[tasks["use"].inputs["y"].name]
    assert giver.publish == {"y": "result"}
    assert giver.outputs[-1] == "y"
    assert [name for name in mine if tasks[name].publish] == [giver.name]
    assert all("raw" in tasks[name].inputs for name in mine)
    run = giver.run
    assert run.part["nodes"][-1] == "join"
    assert run.part["bytes"]["y"] == subject.USUAL_BYTES


def test_late_input_may_come_from_a_later_partition() -> None:
    cuts = cut(two_chains(), 2, 1, bytes_per_s=SPEED)
    found, faults = expanded(parse(request()), {"wide": cuts})
    assert faults == []
    first, other = [task for task in found.tasks if task.name.startswith("wide.")]
    assert [first.name, other.name] == ["wide.0", "wide.1"]
    taker, giver = (first, other) if "y" in first.outputs else (other, first)
    (port,) = taker.run.part["late"]
    assert taker.inputs[port] == Source(kind="task", name=giver.name, output=port)
    assert giver.run.part["late"] == []


def test_measured_times_are_kept_with_each_partition_and_used() -> None:
    """Of its own nodes; and where the graph says how long one takes, that holds."""
    sent = parse(request())
    (wide,) = [task for task in sent.tasks if task.name == "wide"]
    unsaid = (replace(node, est_ms=0.0) for node in two_chains().nodes)
    bare = replace(two_chains(), nodes=tuple(unsaid))
    took_ms = dict.fromkeys(task_graph.order(bare), 7.0)
    known = replace(wide, run=replace(wide.run, took_ms=took_ms))
    found, _ = expanded(
        replace(sent, tasks=tuple(known if task is wide else task for task in sent.tasks)),
        {"wide": cut(two_chains(), 2, 1, bytes_per_s=SPEED)},
    )
    runs = [task.run for task in found.tasks if task.name.startswith("wide.")]
    assert sorted(name for run in runs for name in run.took_ms) == sorted(took_ms)
    for run in runs:
        assert {*run.took_ms} == {*run.part["nodes"]}
        assert {node.est_ms for node in of_run(bare, run).nodes} == {7.0}
    said = graph(node("a", est={"ms": 3.0}), node("b", "a.o", est={}), y="b.o")
    planned = of_run(said, RunSpec(kind="graph", took_ms={"a": 7.0, "b": 7.0, "gone": 7.0}))
    assert [node.est_ms for node in planned.nodes] == [3.0, 7.0]


def test_measured_block_sizes_are_kept_with_each_partition_and_used() -> None:
    """Of what it makes, and of what it takes from others, by the names that these have there."""
    sent = parse(request())
    (wide,) = [task for task in sent.tasks if task.name == "wide"]
    blocks = [block for node in two_chains().nodes for block in node.writes]
    made_bytes = {block: 100 + n for n, block in enumerate(blocks)}
    known = replace(wide, run=replace(wide.run, made_bytes=made_bytes))
    cuts = cut(replace(two_chains(), made_bytes=made_bytes), 2, 1, bytes_per_s=SPEED)
    found, _ = expanded(
        replace(sent, tasks=tuple(known if task is wide else task for task in sent.tasks)),
        {"wide": cuts},
    )
    runs = [task.run for task in found.tasks if task.name.startswith("wide.")]
    assert len(runs) > 1
    assert any(run.part["takes"] for run in runs)
    for run in runs:
        made = {b for b in blocks if b.partition(".")[0] in run.part["nodes"]}
        taken = run.part["takes"]
        assert {*run.made_bytes} == made | {*taken.values()}
        gives = run.part["gives"].items()
        assert run.part["bytes"] == {port: made_bytes[block] for port, block in gives}
        sizes = known_bytes(of_run(two_chains(), run))
        assert {port: sizes[f"{INPUT}{port}"] for port in taken} == {
            port: made_bytes[block] for port, block in taken.items()
        }


def test_measured_sizes_decide_where_a_graph_is_cut() -> None:
    """What reads a large block and a small one stays with the large one."""
    a = [node(f"a{n}", *([f"a{n - 1}.o"] if n else []), est={"ms": 2000}) for n in range(3)]
    b = [node(f"b{n}", *([f"b{n - 1}.o"] if n else []), est={"ms": 2000}) for n in range(3)]
    found = graph(*a, *b, node("x", "a2.o", "b2.o", ms=1), y="x.o")
    for large, small in (("a2.o", "b2.o"), ("b2.o", "a2.o")):
        known = replace(found, made_bytes={large: 300 * MB, small: 1000})
        cuts = cut(known, 2, 1, bytes_per_s=SPEED)
        assert len({mine.number for mine in cuts}) == 2
        assert {block for mine in cuts for block in mine.takes.values()} == {small}


def test_names_taken_by_partitions_are_reported() -> None:
    cuts = cut(two_chains(), 2, 1, bytes_per_s=SPEED)
    long = "w" * (subject.MAX_NAME + 1)
    _, faults = expanded(parse(request(name=long)), {long: cuts})
    assert [(fault.pointer, fault.code) for fault in faults] == [("/tasks/1/name", "range")]
    body = request()
    body["tasks"].append({"name": "wide.0", "run": {"function": "m:use"}})
    _, faults = expanded(parse(body), {"wide": cuts})
    assert [(fault.pointer, fault.code) for fault in faults] == [("/tasks/1/name", "twice")]


@pytest.mark.parametrize("run", [{"job": "m:J"}, {"function": "m:f"}, {"command": ["x"]}])
def test_only_graphs_are_cut(run: JSON) -> None:
    body = {"tasks": [{"name": "t", "run": run, "islands": 2}], "bundle": "sha256:" + "1" * 64}
    with pytest.raises(BadDescriptor) as error:
        parse(body)
    assert [fault.pointer for fault in error.value.faults] == ["/tasks/0/islands"]


@pytest.mark.parametrize("islands", [0, 65, "2", 1.5])
def test_number_of_islands_must_be_a_number(islands: object) -> None:
    with pytest.raises(BadDescriptor) as error:
        parse(request(islands=islands))
    assert [fault.pointer for fault in error.value.faults] == ["/tasks/1/islands"]
