"""The picture of requests that come after each other."""

from __future__ import annotations

import random
import re

import pytest

from app.insight.reports.request_graph import RequestEdge, RequestGraph, RequestNode
from app.pages.request_chart import HEIGHT, WIDTH, request_chart


def graph(edges: list[tuple[str, str]], on: str = "done") -> RequestGraph:
    ids = sorted({end for edge in edges for end in edge})
    nodes = [RequestNode(id=id, name=f"name of {id}", phase="queued") for id in ids]
    found = [RequestEdge(needed=a, dependant=b, on=[on], went="waits") for a, b in edges]
    return RequestGraph(nodes=nodes, edges=found)


def test_request_alone_has_no_picture():
    assert request_chart(RequestGraph(nodes=[], edges=[])) is None


def test_chain_is_a_column():
    chart = request_chart(graph([("a", "b"), ("b", "c")]))
    assert chart is not None
    assert [box.node.id for box in sorted(chart.boxes, key=lambda box: box.y)] == ["a", "b", "c"]
    assert len({box.x for box in chart.boxes}) == 1
    assert chart.width == WIDTH


@pytest.mark.parametrize("seed", range(20))
def test_every_request_stands_below_what_it_waits_for_and_no_line_crosses_a_box(seed):
    rng = random.Random(seed)
    ids = [f"r{n:02}" for n in range(12)]
    pairs = {(ids[rng.randrange(n)], ids[n]) for n in range(1, 12) for _ in range(2)}
    chart = request_chart(graph(sorted(pairs)))
    assert chart is not None
    boxes = {box.node.id: box for box in chart.boxes}
    for a, b in pairs:
        assert boxes[a].y < boxes[b].y
    for one in chart.boxes:
        assert 0 <= one.x <= chart.width - WIDTH
        assert 0 <= one.y <= chart.height - HEIGHT
        for two in chart.boxes:
            assert one is two or one.y != two.y or abs(one.x - two.x) >= WIDTH
    for link in chart.links:
        x = 0
        for command, numbers in re.findall(r"([MCV])([\d ]+)", link.path):
            *_, last = map(int, numbers.split())
            if command == "V":  # it passes through a row, whose boxes end at `last`
                row = [box for box in chart.boxes if box.y + HEIGHT == last]
                assert not any(box.x <= x <= box.x + WIDTH for box in row)
            else:
                x = int(numbers.split()[-2])


def test_only_unusual_conditions_are_written_at_the_line():
    [usual] = request_chart(graph([("a", "b")])).links
    [other] = request_chart(graph([("a", "b")], on="failed")).links
    assert (usual.words, other.words) == ("", "failed")


def test_long_name_is_cut_in_its_box():
    node = RequestNode(id="b", name="x" * 63, phase="deleted")
    edge = RequestEdge(needed="a", dependant="b", on=["done"], went="met")
    first = RequestNode(id="a", name="a", phase="done")
    chart = request_chart(RequestGraph(nodes=[first, node], edges=[edge]))
    assert [box.label for box in chart.boxes] == ["a", "x" * 17 + "…"]
