"""Graphs inside a task: what is read, what is refused and where, and what a resident is to run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.descriptor import BadDescriptor
from app.core.model.fields import Fault
from app.core.model.graphs import task_graph
from app.core.model.graphs.task_graph import (
    INPUT,
    DeclaredTensor,
    Program,
    TaskGraph,
    order,
    parse,
    program,
)
from tests.thoroughness import examples


def node(name: str, reads: str = "", writes: str = "y", **more: Any) -> dict[str, Any]:
    """`reads` are "port=source" words; "port=a.y,b.y" is a list."""
    inputs: dict[str, Any] = {}
    for word in reads.split():
        port, _, source = word.partition("=")
        inputs[port] = source.split(",") if "," in source else source
    return {
        "name": name,
        "function": f"ops:{name.replace('-', '_')}",
        "inputs": inputs,
        "outputs": writes.split(),
        **more,
    }


def graph(*nodes: dict[str, Any], y: str = "", **more: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "outputs": {"y": y or f"{nodes[-1]['name']}.y"}, **more}


def faults(body: object, pointer: str = "") -> tuple[Fault, ...]:
    with pytest.raises(BadDescriptor) as caught:
        parse(body, pointer)
    return caught.value.faults


def told(body: object) -> dict[str, str]:
    return {fault.pointer: fault.code for fault in faults(body)}


F32 = {"dtype": "float32", "shape": ["B", 4]}
TWICE = graph(node("a", "x=input:v"), node("b", "x=a.y"))


# --- what is read -------------------------------------------------------------------------------


def test_a_graph_is_read_with_its_defaults() -> None:
    found = parse(TWICE)
    assert [n.name for n in found.nodes] == ["a", "b"]
    assert (found.outputs, found.ports, found.memory_bytes) == ({"y": "b.y"}, ("v",), 0)
    first = found.nodes[0]
    assert (first.function, first.reads, first.writes) == ("ops:a", ("input:v",), ("a.y",))
    assert first.draws
    assert first.where == "/nodes/0"


def test_nodes_of_a_sub_graph_take_its_place() -> None:
    inner = graph(node("c", "x=input:v"), node("d", "x=c.y"))
    body = graph(
        node("a"),
        {"name": "sub", "graph": inner, "inputs": {"v": "a.y"}},
        node("e", "x=sub.y"),
    )
    found = parse(body)
    assert [n.name for n in found.nodes] == ["a", "sub/c", "sub/d", "e"]
    assert [n.reads for n in found.nodes] == [(), ("a.y",), ("sub/c.y",), ("sub/d.y",)]
    assert found.nodes[2].where == "/nodes/1/graph/nodes/1"


def test_list_passed_to_a_sub_graph_joins_its_list() -> None:
    inner = graph(node("c"), node("d", "xs=c.y,input:v"))
    body = graph(
        node("a"),
        node("b"),
        {"name": "s", "graph": inner, "inputs": {"v": ["a.y", "b.y"]}},
        y="s.y",
    )
    assert parse(body).nodes[-1].reads == ("s/c.y", "a.y", "b.y")


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {"/nodes": "missing", "/outputs": "missing"}),
        (graph(node("a"), node("a")), {"/nodes/1/name": "twice"}),
        (graph({"name": "a"}), {"/nodes/0/function": "missing"}),
        (graph(node("a", size=3)), {"/nodes/0/size": "unknown-field"}),
        (graph(node("a", function="ops")), {"/nodes/0/function": "invalid"}),
        (graph(node("a", "x=b")), {"/nodes/0/inputs/x": "invalid"}),
        (graph(node("a", "x=b.y,b")), {"/nodes/0/inputs/x/1": "invalid"}),
        (graph(node("a", "ctx=input:v")), {"/nodes/0/inputs/ctx": "twice"}),
        (graph(node("a", "x=input:v", params={"x": 1})), {"/nodes/0/params/x": "twice"}),
        (graph(node("a", "x=b.y")), {"/nodes/0/inputs/x": "unbound"}),
        (graph(node("a"), y="a.z"), {"/outputs/y": "unbound"}),
        (graph(node("a"), y="input:v"), {"/outputs/y": "invalid"}),
        (graph(node("a", map="x")), {"/nodes/0/map": "unbound"}),
        (graph(node("a", "x=input:v", inout=["x"])), {"/nodes/0/inout/0": "unbound"}),
        (
            graph(node("a", "x=input:v,input:w", "x", inout=["x"]), y="a.x"),
            {"/nodes/0/inout/0": "invalid"},
        ),
        (graph(node("a", "x=b.y"), node("b", "x=a.y")), {"/nodes/0": "cycle"}),
        (graph(node("a", tensors={"z": F32})), {"/nodes/0/tensors/z": "unbound"}),
        (graph(node("a"), tensors={"z": F32}), {"/tensors/z": "unbound"}),
        (
            graph(node("a", tensors={"y": {"dtype": "float", "shape": [1, -1]}})),
            {"/nodes/0/tensors/y/dtype": "invalid", "/nodes/0/tensors/y/shape/1": "invalid"},
        ),
        (graph(node("a"), limits={"memory": 3}), {"/limits/memory": "unknown-field"}),
        (
            graph({"name": "s", "graph": TWICE, "inputs": {"w": "s.y"}}),
            {"/nodes/0/inputs": "unbound", "/nodes/0/inputs/w": "unbound"},
        ),
        (
            graph({"name": "s", "graph": {**TWICE, "limits": {}}, "inputs": {"v": "input:v"}}),
            {"/nodes/0/graph/limits": "unknown-field"},
        ),
        (
            graph({"name": "s", "graph": TWICE, "inputs": {"v": "input:v"}, "map": "v"}),
            {"/nodes/0/map": "unknown-field"},
        ),
        (graph(node("a", params={"deep": "\x00"})), {"/nodes/0/params/deep": "invalid"}),
    ],
)
def test_each_fault_is_reported_with_its_pointer(
    body: dict[str, Any], expected: dict[str, str]
) -> None:
    assert told(body) == expected


def test_a_fault_says_what_to_do() -> None:
    (fault,) = faults(graph(node("enc"), node("b", "x=emc.y")), "/tasks/0/run/graph")
    assert fault.pointer == "/tasks/0/run/graph/nodes/1/inputs/x"
    assert fault.detail == "no node produces 'emc.y'; did you mean 'enc.y'?"
    ring = graph(node("a", "x=c.y"), node("b", "x=a.y"), node("c", "x=b.y"))
    assert faults(ring)[0].detail == "the nodes form a cycle: a needs c needs b needs a"


# --- what is declared ---------------------------------------------------------------------------


def declared(port: str, dtype: str, *shape: int | str) -> dict[str, Any]:
    return {"tensors": {port: {"dtype": dtype, "shape": list(shape)}}}


@pytest.mark.parametrize(
    ("made", "taken", "why"),
    [
        (("float32", "B", 4), ("float32", "N", 4), None),
        (("float32", "B", 4), ("float32", 7, "C"), None),
        (("float32", 8, 4), ("float32", "N", "N"), "is float32[8, 4]"),
        (("float32", 8, 4), ("float64", 8, 4), "takes float64[8, 4]"),
        (("float32", 8), ("float32", 8, 1), "takes float32[8, 1]"),
        (("float32", 8), ("float32", 9), "takes float32[9]"),
    ],
)
def test_declared_tensors_must_fit(made: Any, taken: Any, why: str | None) -> None:
    body = graph(node("a", **declared("y", *made)), node("b", "x=a.y", **declared("x", *taken)))
    if why is None:
        parse(body)
        return
    (fault,) = faults(body)
    assert (fault.pointer, fault.code) == ("/nodes/1/inputs/x", "misfit")
    assert why in fault.detail


def test_dimension_name_means_one_number_in_the_whole_graph() -> None:
    first = node("a", **declared("y", "int64", 3))
    other = node("b", **declared("y", "int64", 4))
    takes = {"tensors": {port: {"dtype": "int64", "shape": ["N"]} for port in ("p", "q")}}
    (fault,) = faults(graph(first, other, node("c", "p=a.y q=b.y", **takes)))
    assert fault.detail == "b.y is int64[4], but 'q' of c takes int64[3]"


def test_dimension_name_in_a_sub_graph_is_its_own() -> None:
    inner = graph(node("c", "x=input:v", **declared("x", "int64", "N")))
    body = graph(
        node("a", **declared("y", "int64", 3)),
        node("b", **declared("y", "int64", 4)),
        {"name": "p", "graph": inner, "inputs": {"v": "a.y"}},
        {"name": "q", "graph": copy.deepcopy(inner), "inputs": {"v": "b.y"}},
        y="p.y",
    )
    parse(body)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({}, {"map": "x"}, "one tensor"),
        ({"map": "v"}, {}, "a list of tensors"),
        ({"map": "v"}, {"map": "x"}, None),
    ],
)
def test_list_goes_to_the_node_that_maps_over_it(
    first: dict[str, Any], second: dict[str, Any], why: str | None
) -> None:
    body = graph(
        node("a", "v=input:v", **declared("y", "int64", 3), **first),
        node("b", "x=a.y", **declared("x", "int64", 3), **second),
    )
    if why is None:
        parse(body)
    else:
        assert why in faults(body)[0].detail


def test_a_node_that_can_never_fit_is_refused() -> None:
    made = node("a", **declared("y", "float32", 100, 10))
    taken = node("b", "x=a.y", **declared("x", "float32", 100, "N"), est={"memory_bytes": 500})
    parse(graph(made, taken, limits={"memory_bytes": 4500}))
    (fault,) = faults(graph(made, taken, limits={"memory_bytes": 4499}))
    assert (fault.pointer, fault.code) == ("/nodes/1", "memory")
    assert "4500 bytes" in fault.detail
    assert task_graph.largest(parse(graph(made, taken)))[1] == 4500


def test_block_that_a_node_changes_in_place_needs_its_memory_once() -> None:
    tensors = declared("w", "float32", 100)
    changed = node("write", "w=input:v", "w", inout=["w"], **tensors)
    assert task_graph.largest(parse(graph(changed, y="write.w")))[1] == 400


def test_tensor_has_its_size_in_bytes_or_none() -> None:
    assert DeclaredTensor(dtype="bfloat16", shape=(3, 5)).bytes == 30
    assert DeclaredTensor(dtype="bool", shape=()).bytes == 1
    assert DeclaredTensor(dtype="bool", shape=("N",)).bytes is None


# --- the order ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        # Each chain is followed to its end: two blocks are never kept where one would do.
        ("a a2<a b b2<b c<a2+b2", "a a2 b b2 c"),
        # The reader that frees goes before the one that makes more.
        ("a wide<a last<a", "a wide last"),
    ],
)
def test_data_is_used_while_it_is_fresh(edges: str, expected: str) -> None:
    nodes = []
    for word in edges.split():
        name, _, needs = word.partition("<")
        reads = " ".join(f"{n}={n}.y" for n in needs.split("+") if n)
        nodes.append(node(name, reads))
    assert " ".join(order(parse(graph(*nodes)))) == expected


def test_node_that_overwrites_runs_after_the_other_readers() -> None:
    writes = node("write", "w=a.y", "w", inout=["w"])
    found = parse(graph(node("a"), writes, node("read", "x=a.y"), y="write.w"))
    assert order(found) == ("a", "read", "write")
    overwrites = program(found).units[-1]
    assert overwrites.frees == (0,)


# --- properties ---------------------------------------------------------------------------------


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Graphs without cycles, written in any order, with lists, in-out ports and unread blocks."""
    count = draw(st.integers(1, 12))
    nodes = []
    for n in range(count):
        sources = [f"n{m}.{o}" for m in range(n) for o in ("y", "z")] + ["input:u", "input:v"]
        reads = {
            port: draw(
                st.one_of(st.sampled_from(sources), st.lists(st.sampled_from(sources), min_size=1))
            )
            for port in draw(st.lists(st.sampled_from("abc"), unique=True))
        }
        body: dict[str, Any] = {"name": f"n{n}", "function": f"ops:f{n}", "inputs": reads}
        body["outputs"] = ["y", "z"]
        single = [port for port, source in reads.items() if isinstance(source, str)]
        if single and draw(st.booleans()):
            body["inout"] = [single[0]]
            body["outputs"] = ["y", "z", single[0]]
        nodes.append(body)
    outputs = draw(
        st.lists(st.sampled_from([f"n{m}.y" for m in range(count)]), min_size=1, unique=True)
    )
    shuffled = draw(st.permutations(nodes))
    return {"nodes": shuffled, "outputs": {f"o{n}": block for n, block in enumerate(outputs)}}


def meaning(found: TaskGraph) -> dict[str, Any]:
    """What each output is: the expression that makes it."""
    maker = {block: node for node in found.nodes for block in node.writes}

    def value(block: str) -> Any:
        if block.startswith(INPUT):
            return block
        made = maker[block]
        taken = {port: tuple(map(value, b.sources)) for port, b in made.inputs.items()}
        return made.function, block.rpartition(".")[2], tuple(sorted(taken.items()))

    return {port: value(block) for port, block in found.outputs.items()}


def played(found: Program) -> dict[str, Any]:
    """What a resident would have at the end; it never keeps what nobody will read."""
    blocks: dict[int, Any] = {
        n: name for n, name in enumerate(found.blocks) if name.startswith(INPUT)
    }
    for at, unit in enumerate(found.units):
        taken = {port: tuple(blocks[n] for n in numbers) for port, numbers, _ in unit.inputs}
        for output, number in unit.outputs:
            assert number not in blocks
            blocks[number] = unit.function, output, tuple(sorted(taken.items()))
        for number in unit.frees:
            del blocks[number]
        to_come = {n for later in found.units[at + 1 :] for _, ns, _ in later.inputs for n in ns}
        assert set(blocks) <= to_come | set(found.outputs.values())
    return {port: blocks[n] for port, n in found.outputs.items()}


@given(bodies())
def test_program_gives_what_its_graph_gives_and_keeps_no_block_too_long(
    body: dict[str, Any],
) -> None:
    found = parse(body)
    names = order(found)
    assert sorted(names) == sorted(n.name for n in found.nodes)
    assert played(program(found)) == meaning(found)
    as_numbered = sorted(names, key=lambda name: int(name[1:]))
    assert played(program(found, as_numbered)) == meaning(found)


@settings(max_examples=examples(40))
@given(bodies(), bodies())
def test_sub_graph_gives_what_it_gives_alone(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    alone = meaning(parse(inner))
    given = {port: f"input:{port}" for port in parse(inner).ports}
    both = copy.deepcopy(outer)
    both["nodes"].insert(0, {"name": "sub", "graph": inner, "inputs": given})
    both["outputs"] |= {f"s{port}": f"sub.{port}" for port in inner["outputs"]}
    found = meaning(parse(both))
    assert {p: found[f"s{p}"] for p in alone} == alone
    assert {p: found[p] for p in outer["outputs"]} == meaning(parse(outer))


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=20,
)


@given(bodies(), st.data())
def test_any_json_is_read_or_refused(body: dict[str, Any], data: st.DataObject) -> None:
    spoiled: Any = body
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.sampled_from(list(spoiled) if isinstance(spoiled, dict) else [0]))
        if not isinstance(spoiled, dict | list) or not spoiled:
            break
        if data.draw(st.booleans()) or not isinstance(spoiled[at], dict | list):
            spoiled[at] = data.draw(JSONS)
            break
        spoiled = spoiled[at]
    try:
        found = parse(body)
    except BadDescriptor:
        return
    played(program(found))
