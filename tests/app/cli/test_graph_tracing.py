"""Graphs written down by calling: what comes out is what a request takes."""

from __future__ import annotations

import pytest

from app.cli.graph_tracing import NotTraced, each, graph, node
from app.core.model.descriptor import BadDescriptor
from app.core.model.graphs import task_graph
from app.data import graphs


def encode(ctx, x, w, *, width=64):
    raise AssertionError("nothing is run")


split = node("ops:split", "parts", "rest")
enc = node(encode, "h")
vote = node("ops:vote", "y")


def test_calls_become_nodes_and_blocks_become_edges():
    with graph() as g:
        raw = g.input("raw", "float32", ["B", 4])
        parts, rest = split(raw=raw, count=3)
        h = enc(each(parts), rest, width=32)
        g.output(y=vote(xs=[h, rest]))
    assert g.json() == {
        "nodes": [
            {
                "name": "split",
                "function": "ops:split",
                "inputs": {"raw": "input:raw"},
                "outputs": ["parts", "rest"],
                "params": {"count": 3},
            },
            {
                "name": "encode",
                "function": f"{__name__}:encode",
                "inputs": {"x": "split.parts", "w": "split.rest"},
                "outputs": ["h"],
                "params": {"width": 32},
                "map": ["x"],
            },
            {
                "name": "vote",
                "function": "ops:vote",
                "inputs": {"xs": ["encode.h", "split.rest"]},
                "outputs": ["y"],
            },
        ],
        "outputs": {"y": "vote.y"},
        "tensors": {"raw": {"dtype": "float32", "shape": ["B", 4]}},
    }


def test_nodes_of_one_function_are_numbered_and_may_be_named():
    with graph() as g:
        vote(xs=vote(xs=g.input("x")))
        vote.named("last")(xs=g.input("x"))
        vote.named("vote-2")(xs=g.input("x"))
    assert [n["name"] for n in g.nodes] == ["vote", "vote-2", "last", "vote-2-2"]


def test_called_graph_becomes_a_sub_graph():
    with graph("twice") as inner:
        inner.output(y=vote(xs=vote(xs=inner.input("x"))))
    with graph() as g:
        first = inner(x=g.input("raw"))
        g.output(y=inner(x=first))
    found = task_graph.parse(g.json())
    assert [n.name for n in found.nodes] == [
        "twice/vote", "twice/vote-2", "twice-2/vote", "twice-2/vote-2"
    ]  # fmt: skip
    assert found.nodes[2].reads == ("twice/vote-2.y",)


def test_settings_of_a_node_are_kept():
    grow = node("ops:grow", "state", inout=["state"], draws=False)
    with graph(memory_bytes=1000) as g:
        g.output(state=grow(state=g.input("s")))
    (found,) = task_graph.parse(g.json()).nodes
    assert (found.inout, found.draws) == (("state",), False)
    assert task_graph.parse(g.json()).memory_bytes == 1000


def test_hash_of_a_graph_is_the_one_of_the_service():
    with graph() as g:
        g.output(y=vote(xs=g.input("x")))
    assert graphs.read(g.json()).sha256 == g.sha256


def test_call_that_cannot_be_traced_is_refused_with_the_reason():
    with pytest.raises(NotTraced, match="must be called within"):
        vote(xs=1)
    with graph() as other:
        foreign = vote(xs=other.input("x"))
    with graph() as g:
        with pytest.raises(
            NotTraced, match="'xs' must be a block of this graph; got a block of another graph"
        ):
            vote(xs=foreign)
        with pytest.raises(NotTraced, match="pass each argument by name"):
            vote(g.input("x"))
        with pytest.raises(
            NotTraced, match=r"encode got 4 positional arguments: its ports are x, w, width"
        ):
            enc(1, 2, 3, 4)
        with pytest.raises(NotTraced, match="encode got two values for x"):
            enc(g.input("x"), x=1)
        with pytest.raises(NotTraced, match="called inside itself"):
            g()
    with pytest.raises(BadDescriptor):
        g.json()  # no outputs, no nodes
