"""Graphs in a resident: the right values, the same bits whatever happens, and whose memory."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
import random
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.core.model.descriptor import BadDescriptor
from app.core.model.graphs import task_graph
from app.core.model.protocol.messages import Failed, Finished, Saved, Started
from tests.thoroughness import rest_long
from tests.workers import warm_zygotes
from tests.workers.conftest import BUNDLE, PRESET, DeviceRig
from workers.graph import runner
from workers.graph.runner import Loaded, NodeFailed, weigh
from workers.hardware.accelerator import Accelerator
from workers.process import untrusted
from workers.residents.context import Context

spec = importlib.util.spec_from_file_location("nodes", BUNDLE / "nodes.py")
assert spec is not None
assert spec.loader is not None
nodes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nodes)


def node(name: str, function: str, reads: str = "", writes: str = "y", **more: Any) -> Any:
    """`reads` are "port=source" words; "port=a.y,b.y" is a list."""
    inputs: dict[str, Any] = {}
    for word in reads.split():
        port, _, source = word.partition("=")
        inputs[port] = source.split(",") if "," in source else source
    given = {"inputs": inputs, "outputs": writes.split(), **more}
    return {"name": name, "function": f"nodes:{function}", **given}


def body(*those: Any, **outputs: str) -> Any:
    return {"nodes": list(those), "outputs": outputs or {"y": f"{those[-1]['name']}.y"}}


def loaded(graph_: Any, kind: str = "cpu", **memory: int) -> Loaded:
    def find(target: str) -> Any:
        return getattr(nodes, target.partition(":")[2])

    return Loaded(graph_, find, Accelerator(kind), **memory)


def context(kind: str = "cpu") -> Context:
    return Context(device=torch.device(kind), rank=0, world_size=1, params={})


def ran(graph_: Any, kind: str = "cpu", **inputs: Any) -> Any:
    job, ctx = loaded(graph_, kind).begin(inputs), context(kind)
    while ctx.result is None:
        job.step(ctx)
    return ctx.result


# --- what comes out -----------------------------------------------------------------------------


def test_times_of_the_longest_nodes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that maps the mean of its shards, which here take a second by a clock that is ours."""
    seconds = itertools.count()
    monkeypatch.setattr("workers.graph.runner._clock", lambda: next(seconds))
    pieces = node("p", "pieces", writes="parts", params={"count": 3})
    sent = body(pieces, node("d", "double", "x=p.parts", map="x"), node("t", "total", "xs=d.y"))
    job, ctx = loaded(sent).begin({}), context()
    while ctx.result is None:
        job.step(ctx)
    assert job.took_ms() == dict.fromkeys("pdt", 1000.0)
    monkeypatch.setattr("workers.graph.runner.TIMED_LIMIT", 2)
    assert len(job.took_ms()) == 2


def sizes(graph_: Any) -> dict[str, int]:
    job, ctx = loaded(graph_).begin({}), context()
    while ctx.result is None:
        job.step(ctx)
    return job.made_bytes()


def test_sizes_of_undeclared_blocks_are_reported() -> None:
    """Lists as a whole, however many items; what is within a module is not looked for."""
    starts = [node(f"s{n}", "start", params={"seed": n}) for n in range(2)]
    one = ran(body(starts[0]))["y"]
    pieces = node("p", "pieces", writes="parts", params={"count": 5})
    each = ran(body(pieces, y="p.parts"))["y"]
    shape = {"y": {"dtype": str(one.dtype).removeprefix("torch."), "shape": [*one.shape]}}
    found = sizes(
        body(
            starts[0],
            starts[1] | {"tensors": shape},
            pieces,
            node("d", "double", "x=p.parts", map="x"),
            node("state", "begin_training", writes="state"),
            node("l", "listed", "x=s0.y"),
            y="d.y",
        )
    )
    listed = ran(body(starts[0], node("l", "listed", "x=s0.y"), y="l.y"))["y"]
    assert isinstance(listed, list)
    whole = sum(x.nbytes for x in each)
    assert found == {"s0.y": one.nbytes, "p.parts": whole, "d.y": whole, "l.y": 8 * len(listed)}


def test_impossible_block_size_is_not_reported() -> None:
    """Whoever hears of it would think that the process lies, and end it."""
    said = {"made_bytes": sizes(body(node("e", "expanded"), node("f", "first", "x=e.y")))}
    assert untrusted.made_bytes(said) == said["made_bytes"] == {"f.y": 4}


def test_known_block_is_measured_again_only_after_a_long_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node takes no time here, and then a second, by a clock that is ours."""
    known = task_graph.parse(body(node("a", "start"), node("b", "double", "x=a.y")))
    known = replace(known, made_bytes={"a.y": 999})
    monkeypatch.setattr("workers.graph.runner._clock", lambda: 0.0)
    assert sizes(known) == {"b.y": 16}
    seconds = itertools.count()
    monkeypatch.setattr("workers.graph.runner._clock", lambda: next(seconds))
    assert sizes(known) == {"a.y": 16, "b.y": 16}


def test_measuring_of_block_sizes_ends_soon() -> None:
    """With more parts than it may take, with what holds itself, and with what it does not know."""
    many = [torch.zeros(3)] * 1000
    assert weigh(many, 1001) == 12_000
    assert weigh(many, 1000) is None
    ring: list[Any] = []
    ring.append(ring)
    assert weigh(ring, 1000) is None
    assert weigh({"a": [torch.zeros(2, 3), 1.5], "b": ("word", None)}, 10) == 24 + 8 + 4 + 8
    assert weigh(torch.eye(3).to_sparse(), 10) is None
    assert weigh(torch.nn.Linear(2, 2), 10) is None


def test_node_may_make_an_object_without_a_size() -> None:
    found = sizes(body(node("s", "sparse"), node("d", "dense", "x=s.y")))
    assert found == {"d.y": 36}


def test_blocks_go_from_node_to_node() -> None:
    y = ran(
        body(
            node("a", "start", params={"seed": 3}),
            node("b", "add", "x=a.y", params={"by": 2}),
            node("c", "double", "x=b.y"),
            node("d", "total", "xs=c.y,b.y,input:v"),
        ),
        v=torch.ones(4),
    )["y"]
    assert y.tolist() == [(3 + 2) * 2 + (3 + 2) + 1] * 4


def test_one_node_maps_over_lists_in_step() -> None:
    y = ran(
        body(
            node("p", "pieces", writes="parts"),
            node("d", "double", "x=p.parts", map="x"),
            node("b", "pairs", "x=d.y y=p.parts", map=["x", "y"]),
            node("t", "total", "xs=b.y"),
        )
    )["y"]
    assert y.tolist() == [sum(2 * n * 10 + n for n in range(5))] * 4


def test_list_of_blocks_is_mapped_over_and_an_empty_one_gives_an_empty_list() -> None:
    listed = node("d", "double", "x=a.y,b.y", map="x")
    both = ran(body(node("a", "start", params={"seed": 1}), node("b", "start"), listed))["y"]
    assert [y.tolist() for y in both] == [[2.0] * 4, [0.0] * 4]
    none = node("p", "pieces", writes="parts", params={"count": 0})
    assert ran(body(none, node("d", "double", "x=p.parts", map="x"))) == {"y": []}


def test_random_numbers_depend_on_the_name_and_not_on_the_order() -> None:
    def drawn(*those: Any) -> Any:
        return ran(body(node("s", "start"), *those, y="a.y"))["y"].tolist()

    alone = drawn(node("a", "draw", "x=s.y"))
    assert drawn(node("b", "draw", "x=s.y"), node("a", "draw", "x=s.y")) == alone
    assert drawn(node("a", "draw", "x=s.y"), node("b", "draw", "x=s.y")) == alone
    assert ran(body(node("s", "start"), node("b", "draw", "x=s.y")))["y"].tolist() != alone


def test_each_shard_draws_its_own_numbers() -> None:
    listed = node("p", "pieces", writes="parts", params={"count": 3})
    first, second, _ = ran(body(listed, node("d", "draw", "x=p.parts", map="x")))["y"]
    assert not torch.equal(first, second - 1)


def test_node_that_draws_nothing_need_not_be_seeded() -> None:
    unseeded = [node("s", "start", draws=False), node("a", "draw", "x=s.y", draws=False)]
    job, ctx = loaded(body(*unseeded)).begin({}), context()
    torch.manual_seed(7)
    while ctx.result is None:
        job.step(ctx)
    torch.manual_seed(7)
    differences = ctx.result["y"] - torch.rand(4)  # what the other two sources gave
    assert torch.allclose(differences, differences[0])


def test_a_node_may_end_the_graph_early() -> None:
    early = body(node("a", "start"), node("b", "stop", "x=a.y"), node("c", "wrong", "x=b.y"))
    assert ran(early) == {"stopped": 0.0}


# --- plain nodes, in bursts ---------------------------------------------------------------------


def drawn_graph(dice: random.Random) -> Any:
    """Nodes of all kinds that read from any that stand before them; some make what it gives."""
    those = [node("n0", "start", params={"seed": dice.randrange(9)})]
    for n in range(1, 30):
        one, other = (f"n{dice.randrange(n)}.y" for _ in range(2))
        kinds = [
            node(f"n{n}", "start", params={"seed": n}, draws=dice.random() < 0.5),
            node(f"n{n}", "add", f"x={one}", params={"by": n}),
            node(f"n{n}", "double", f"x={one}", draws=dice.random() < 0.5),
            node(f"n{n}", "draw", f"x={one}"),
            node(f"n{n}", "pairs", f"x={one} y={other}"),
            node(f"n{n}", "total", f"xs={one},{other},input:v"),
            node(f"n{n}", "noise", f"x={one}"),
        ]
        those.append(dice.choice(kinds))
    given = {f"g{n}": f"n{n}.y" for n in dice.sample(range(29), 3)}
    return body(*those, y="n29.y", **given)


def all_states(job: Any) -> list[Any]:
    """Before each step, and at the end, with what it gives; as it can be compared."""
    ctx, found = context(), [comparable(job.state())]
    while ctx.result is None:
        job.step(ctx)
        found.append((comparable(job.state()), comparable(job.made()), job.count))
    return [*found, comparable(ctx.result)]


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: comparable(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("burst_s", [-1.0, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_a_plain_node_runs_as_any_other_does(
    seed: int, burst_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each a step, and as many in one as can be; beside it the graph as if none was plain."""
    monkeypatch.setattr(runner, "BURST_S", burst_s)
    nodes.noise = lambda ctx, x: {"y": x + torch.rand(4)}
    drawn = drawn_graph(random.Random(seed))
    plain, other = loaded(drawn), loaded(drawn)
    assert plain.plain_until != [*range(30)]
    other.plain_until = [*range(30)]
    jobs = [each.begin({"v": torch.ones(4)}) for each in (plain, other)]
    assert all_states(jobs[0]) == all_states(jobs[1])
    assert jobs[0].took_ms().keys() == jobs[1].took_ms().keys() == {f"n{n}" for n in range(30)}
    assert jobs[0].made_bytes() == jobs[1].made_bytes()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda ctx, x: {"z": x}, "it returned 'z'"),
        (lambda ctx, x: {"y": x, "z": x}, "it returned 'y', 'z'"),
        (lambda ctx, x: {}, "it returned nothing"),
        (lambda ctx, x: [x], "it returned a list"),
        (lambda ctx, x: {"y": x.add_(1)}, "wrote to a tensor"),
        (lambda ctx, x: {"y": x.requires_grad_() * 2}, "return y.detach()"),
        (lambda ctx, x: {"y": 1 // 0}, "division"),
    ],
)
def test_a_plain_node_fails_as_any_other_does(
    function: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the midst of a burst; the one that failed is named."""
    monkeypatch.setattr(runner, "BURST_S", 10.0)
    names, kinds = "abcd", ("start", "double", "odd", "double")
    reads = ("", "x=a.y", "x=b.y", "x=c.y")
    failing = body(*map(node, names, kinds, reads))
    nodes.odd = function
    for plain in (True, False):
        sent = loaded(failing)
        sent.plain_until = sent.plain_until if plain else [*range(4)]
        with pytest.raises(NodeFailed, match=r"node c \(nodes:odd\)") as failed:
            sent.begin({}).step(context())
        assert told in str(failed.value.__cause__)


def test_value_made_under_inference_mode_may_be_read() -> None:
    """Torch counts no writes to it."""
    nodes.inferred = torch.inference_mode()(lambda ctx: {"y": torch.ones(2)})
    y = ran(body(node("i", "inferred"), node("d", "double", "x=i.y")))["y"]
    assert y.tolist() == [2.0, 2.0]


# --- whose memory -------------------------------------------------------------------------------


def grown(*those: Any, **outputs: str) -> Any:
    grow = node("g", "grow", "state=s.y", "state", inout=["state"])
    return ran(body(node("s", "start"), *those, grow, **outputs))


def test_inout_port_writes_in_place_if_nothing_else_needs_the_block() -> None:
    state = torch.zeros(4)
    grow = node("g", "grow", "state=input:s", "state", inout=["state"])
    assert ran(body(grow, y="g.state"), s=state)["y"] is state
    assert state.tolist() == [1.0] * 4


def test_other_reader_of_a_block_or_a_view_sees_its_former_value() -> None:
    assert grown(y="g.state", was="s.y")["was"].tolist() == [0.0] * 4
    view = node("v", "identity", "x=s.y")
    nodes.identity = lambda ctx, x: {"y": x[1:]}
    assert grown(view, y="g.state", was="v.y")["was"].tolist() == [0.0] * 3
    nodes.identity = lambda ctx, x: {"y": {"deep": [x.numpy()]}}
    assert grown(view, y="g.state", was="v.y")["was"]["deep"][0].tolist() == [0.0] * 4


def test_item_of_a_list_may_be_written_in_place_if_it_is_held_once() -> None:
    grow = node("g", "grow", "state=input:v", "state", inout=["state"], map="state")
    one, other = torch.zeros(2), torch.zeros(2)
    apart = ran(body(grow, y="g.state"), v=[one, other])["y"]
    assert apart[0] is one
    assert apart[1] is other
    shared = torch.zeros(2)
    both = ran(body(grow, y="g.state"), v=[shared, shared])["y"]
    assert [y.tolist() for y in both] == [[1.0, 1.0], [1.0, 1.0]]
    assert shared.tolist() == [0.0, 0.0]


def test_block_is_released_when_its_last_reader_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BURST_S", -1.0)  # one node a step
    adds = [node(f"n{n}", "add", f"x={f'n{n - 1}' if n else 'a'}.y") for n in range(5)]
    job, ctx = loaded(body(node("a", "start"), *adds)).begin({}), context()
    while ctx.result is None:
        job.step(ctx)
        assert len(job.state()["blocks"]) == 1
        assert sum(value is not None for value in job.blocks) == 1


def test_item_is_released_when_its_shard_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BURST_S", -1.0)
    mapped = body(node("p", "pieces", writes="parts"), node("d", "double", "x=p.parts", map="x"))
    job, ctx = loaded(mapped).begin({}), context()
    for shards in range(5):
        job.step(ctx)
        held = [*(job.items or {"x": job.blocks[0]})["x"], *(job.blocks[1] or [])]
        assert sum(value is not None for value in held) == 5, shards


# --- what a node may not do ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "cause", "told"),
    [
        ("wrong", ValueError, "no good: 0.0"),
        ("misnamed", runner.BadBlock, "it returned 'z'; its outputs are y"),
        ("scribble", runner.BadBlock, "wrote to a tensor that other nodes may read"),
        ("with_history", runner.BadBlock, "return y.detach()"),
        ("nothing", runner.BadBlock, "it returned a NoneType; a node returns a dict of y"),
    ],
)
def test_a_node_that_fails_is_named(function: str, cause: type, told: str) -> None:
    nodes.nothing = lambda ctx, x: None
    failing = node("b", function, "x=a.y")
    with pytest.raises(NodeFailed, match=rf"node b \(nodes:{function}\)") as failed:
        ran(body(node("a", "start"), failing))
    assert isinstance(failed.value.__cause__, cause)
    assert told in str(failed.value.__cause__)


def test_mapped_inputs_must_be_lists_of_one_length() -> None:
    for given, told in [
        (
            {"x": torch.ones(2), "y": [1]},
            "'x' must be a list, because the node maps over it; got a Tensor",
        ),
        ({"x": [1, 2], "y": [1]}, "2 of 'x', 1 of 'y' items"),
    ]:
        both = node("b", "pairs", "x=input:x y=input:y", map=["x", "y"])
        with pytest.raises(NodeFailed) as failed:
            ran(body(both), **given)
        assert told in str(failed.value.__cause__)


def test_block_must_be_as_declared() -> None:
    def declared(*shape: Any, dtype: str = "float32") -> Any:
        return {"x": {"dtype": dtype, "shape": list(shape)}}

    for tensors in (declared(4), declared("N")):
        ran(body(node("a", "start"), node("b", "double", "x=a.y", tensors=tensors)))
    for tensors in (declared(5), declared(4, 1), declared(4, dtype="int64")):
        with pytest.raises(NodeFailed) as failed:
            ran(body(node("a", "start"), node("b", "double", "x=a.y", tensors=tensors)))
        assert "'x' is float32[4]" in str(failed.value.__cause__)


def test_dimension_name_in_a_shape_is_one_number_in_the_whole_graph() -> None:
    tensors = {"x": {"dtype": "float32", "shape": ["N"]}}
    two = [node(f"b{n}", "double", f"x=a{n}.y", tensors=tensors) for n in range(2)]
    starts = [node(f"a{n}", "start", params={"size": 4 + n}) for n in range(2)]
    with pytest.raises(NodeFailed) as failed:
        ran(body(*starts, *two, y="b0.y", z="b1.y"))
    assert "{'N': " in str(failed.value.__cause__)


# --- stopped anywhere, begun again --------------------------------------------------------------

MIXED = body(
    node("start", "start", params={"seed": 3}),
    node("parts", "pieces", writes="parts", params={"count": 7}),
    node("noisy", "draw", "x=parts.parts", map="x"),
    node("sum", "total", "xs=noisy.y"),
    node("one", "draw", "x=sum.y"),
    node("two", "draw", "x=sum.y"),
    node("grown", "grow", "state=noisy.y", "state", inout=["state"], map="state"),
    {
        "name": "inner",
        "graph": body(node("d", "draw", "x=input:x"), node("e", "double", "x=d.y")),
        "inputs": {"x": "start.y"},
    },
    node("all", "total", "xs=one.y,two.y,inner.y"),
    node("more", "total", "xs=grown.state"),
    node("end", "pairs", "x=all.y y=more.y"),
    node("list", "listed", "x=end.y"),
    y="list.y",
)


@pytest.mark.parametrize("seed", range(5))
def test_graph_can_be_paused_after_any_node_and_shard(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = ran(MIXED)
    monkeypatch.setattr(runner, "BURST_S", -1.0)  # one node a step
    dice, ctx = random.Random(seed), context()
    job, counts = loaded(MIXED).begin({}), [0]
    while ctx.result is None:
        job.step(ctx)
        counts.append(job.count)
        if dice.random() < 0.5:
            job = loaded(MIXED).go_on(copy.deepcopy(job.state()))
    assert counts == list(range(len(counts)))
    assert counts[-1] == 10 + 2 * 7 + 1
    assert ctx.result == undisturbed


def test_resumed_graph_continues_in_its_first_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a newer version would choose."""
    monkeypatch.setattr(runner, "BURST_S", -1.0)
    undisturbed, ctx = ran(MIXED), context()
    job = loaded(MIXED).begin({})
    for _ in range(4):
        job.step(ctx)
    names = list(job.program.order)
    monkeypatch.setattr(task_graph, "order", lambda graph_: tuple(sorted(names)))
    job = loaded(MIXED).go_on(copy.deepcopy(job.state()))
    while ctx.result is None:
        job.step(ctx)
    assert ctx.result == undisturbed


# --- in residents -------------------------------------------------------------------------------


def launched(
    rig: DeviceRig, task: str, graph_: Any, epoch: int = 1, *, part: Any = None, **more: Any
) -> None:
    """The graph, or a partition of it."""
    sha256, _ = rig.store.put([task_graph.canonical(graph_)])
    run = {"graph": f"sha256:{sha256}"} | ({"part": part} if part else {})
    rig.launch(task, run, epoch, **more)


NAPS = 40


def napping(*, trains: int = NAPS, nap_s: float = 0.004, train_s: float = 0.003) -> Any:
    """Shards that nap, then a chain that trains; each for so long, or until it may end."""
    nap, train = {"nap_s": nap_s}, {"nap_s": train_s}
    return body(
        node("parts", "pieces", writes="parts", params={"count": NAPS}),
        node("naps", "nap", "x=parts.parts", map="x", params=nap),
        node("begin", "begin_training", writes="state"),
        *(
            node(f"t{n}", "train", f"state={m}.state", "state", inout=["state"], params=train)
            for n, m in [(n, f"t{n - 1}" if n else "begin") for n in range(trains)]
        ),
        node("sum", "checksum", f"state=t{trains - 1}.state", "sum first"),
        node("all", "total", "xs=naps.y"),
        node("list", "listed", "x=all.y"),
        sum="sum.sum",
        first="sum.first",
        drawn="list.y",
    )


LONG = napping()
#: The same with naps of many seconds: it has not finished before it is disturbed.
SLOW = napping(nap_s=0.5, train_s=0.5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What LONG gives when nothing happens to it, in a process of its own without a sandbox."""
    path = tmp_path_factory.mktemp("graphs") / "long.json"
    path.write_text(json.dumps(LONG))
    words = (str(BUNDLE), str(path), "--preset", json.dumps(PRESET))
    said = warm_zygotes.said_by("examples.job_alone", *words)
    return json.loads(said.splitlines()[-1])["result"]


def test_a_graph_gets_its_inputs_and_gives_its_outputs(rig: DeviceRig) -> None:
    rig.launch("t1", "nodes:start", params={"seed": 5}, outputs=["y"])
    made = rig.event(Finished, "t1").outputs["y"]
    double = body(node("d", "double", "x=input:x"), node("l", "listed", "x=d.y"), y="d.y", z="l.y")
    launched(rig, "t2", double, inputs={"x": made}, outputs=["y"])
    finished = rig.event(Finished, "t2")
    assert finished.result == {"z": [10.0] * 4}
    assert finished.step == 2
    launched(rig, "t3", body(node("l", "listed", "x=input:x")), inputs={"x": finished.outputs["y"]})
    assert rig.event(Finished, "t3").result == {"y": [10.0] * 4}


def test_output_of_a_graph_is_reported_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "BURST_S", -1.0)
    ctx = context()
    one = body(node("a", "start"), node("b", "double", "x=a.y"), a="a.y", b="b.y", again="a.y")
    job = loaded(one).begin({})
    job.step(ctx)
    made = job.made()
    assert made.keys() == {"a", "again"}
    assert job.made() == {}
    job.step(ctx)
    assert job.made().keys() == {"b"}
    assert ctx.result is not None
    assert ctx.result["a"] is made["a"] is made["again"], "the very same"
    job = loaded(one).go_on(copy.deepcopy(job.state()))
    assert job.made().keys() == {"a", "b", "again"}, "another process gives all of it"


def test_outputs_are_stored_while_the_graph_runs_on(rig: DeviceRig) -> None:
    """And are told when it has finished; one that is paused meanwhile gives the same."""
    naps = [
        node(f"n{n}", "nap", f"x=n{n - 1}.y" if n else "x=a.y", params={"nap_s": 0.5})
        for n in range(60)
    ]
    both = node("both", "total", "xs=a.y,n59.y")
    two = body(node("a", "start"), *naps, both, node("l", "listed", "x=both.y"), a="a.y", l="l.y")
    launched(rig, "t1", two, outputs=["a"])
    rig.event(Started, "t1")
    (resident,) = rig.supervisor.stays.residents.values()
    rig.until(lambda: "a" in resident.outputs)
    assert not rig.all(Finished, "t1")
    images = rig.paused_and_saved("t1", 1)
    rig.drop.append(["t1", 1])
    rig.until(lambda: not rig.supervisor.stays.residents)
    launched(rig, "t1", two, 2, outputs=["a"], images=images)
    rig.event(Started, "t1", 2)
    rig.let_end("t1", 2)
    finished = rig.event(Finished, "t1", 2)
    launched(rig, "t2", two, outputs=["a"])
    rig.event(Started, "t2")
    rig.let_end("t2")
    undisturbed = rig.event(Finished, "t2")
    assert undisturbed.result == finished.result
    assert undisturbed.outputs.keys() == finished.outputs.keys() == {"a"}


@pytest.mark.parametrize("seed", rest_long(range(3)))
def test_a_disturbed_graph_ends_with_the_same_bits(
    seed: int, rig: DeviceRig, undisturbed: Any
) -> None:
    """Paused at random nodes, resumed in place or in a fresh process, and checkpointed."""
    dice = random.Random(seed)
    images: list[dict[str, object]] = []
    resumed = []
    for epoch in range(1, 8):
        launched(rig, "t1", SLOW, epoch, images=images, checkpoint_every_s=0.05)
        resumed.append(rig.event(Started, "t1", epoch).resumed)
        if epoch == 7:
            break
        time.sleep(dice.uniform(0, 0.05))
        images = rig.paused_and_saved("t1", epoch)
        if dice.random() < 0.6:
            rig.drop.append(["t1", epoch])
            rig.until(lambda: not rig.supervisor.stays.residents)
    rig.let_end("t1", epoch)
    finished = rig.event(Finished, "t1", epoch)
    assert finished.result == undisturbed, resumed
    assert finished.step == 2 * NAPS + 5
    assert {"fresh", "resident", "image"} >= set(resumed) > {"fresh"}


def test_a_killed_graph_goes_on_from_its_checkpoint(rig: DeviceRig, undisturbed: Any) -> None:
    launched(rig, "t1", SLOW, checkpoint_every_s=0.05)
    saved = rig.event(Saved, "t1")
    (resident,) = rig.supervisor.stays.residents.values()
    os.kill(resident.pid, signal.SIGKILL)
    rig.event(Failed, "t1")
    launched(rig, "t1", SLOW, 2, images=[rig.image(saved)])
    assert rig.went_on_from(saved)
    rig.let_end("t1", 2)
    assert rig.event(Finished, "t1", 2).result == undisturbed


def test_failed_node_is_reported_with_its_function_and_traceback(rig: DeviceRig) -> None:
    launched(rig, "t1", body(node("first", "start"), node("bad", "wrong", "x=first.y")))
    failed = rig.event(Failed, "t1")
    assert failed.cause == "exception"
    assert failed.message == "In the node bad (nodes:wrong): ValueError: no good: 0.0"
    assert "nodes.py" in failed.detail
    assert "graph.py" not in failed.detail
    assert "workers/residents" not in failed.detail


def test_missing_function_is_reported_before_anything_runs(rig: DeviceRig) -> None:
    launched(rig, "t1", body(node("a", "start"), node("b", "absent", "x=a.y")))
    failed = rig.event(Failed, "t1")
    assert (failed.cause, failed.step) == ("bundle", 0)
    assert "no 'absent'" in failed.message


def test_a_block_that_cannot_be_captured_is_named(rig: DeviceRig) -> None:
    slow = node("nap", "nap", "x=a.y", params={"nap_s": 0.05})
    odd = node("odd", "a_generator", "x=a.y")
    end = node("end", "total", "xs=nap.y,odd.y")
    launched(rig, "t1", body(node("a", "start"), odd, slow, end))
    failed = rig.event(Failed, "t1")
    assert failed.cause == "uncapturable"
    assert failed.message.startswith("job['blocks']['odd.y']: generator cannot be captured.")


def test_graph_missing_in_the_store_is_reported(rig: DeviceRig) -> None:
    rig.launch("t1", {"graph": f"sha256:{'0' * 64}"})
    failed = rig.event(Failed, "t1")
    assert failed.cause == "bundle"
    assert "not there" in failed.message


def test_invalid_graph_is_refused_by_the_runner_too() -> None:
    with pytest.raises(BadDescriptor):
        loaded({"nodes": [], "outputs": {}})
