"""A graph whose blocks need more than its budget: the same values, and never more on the device."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import numpy
import pytest
import torch

from app.core.model.protocol.messages import Finished, Started
from tests.workers.conftest import ROOT, DeviceRig
from tests.workers.graph.test_runner import (
    body,
    context,
    launched,
    loaded,
    node,
    ran,
)
from workers.device.processes.resident import Resident
from workers.graph import runner
from workers.graph.runner import Loaded, NodeFailed
from workers.graph.spill import NoRoom, SpillBudget
from workers.hardware.accelerator import Accelerator

MB = 1 << 20
COUNT, SIZE = 32, MB // 4  # so many tensors of a MiB each
BUDGET = 8 * MB  # of 32 MiB, a quarter


def large(*, count: int = COUNT, nap_s: float = 0.0, **limits: int) -> Any:
    """All of the first round is kept until the third reads it again, in the order of the items.

    The second round naps, when most of the first has been spilled.
    """
    block = {"dtype": "float32", "shape": [SIZE]}
    made, nap = {"tensors": {"y": block}}, {"nap_s": nap_s}
    return body(
        node("parts", "indices", writes="parts", params={"count": count}),
        node("a", "filled", "n=parts.parts", map="n", params={"size": SIZE}, **made),
        node("b", "double", "x=a.y", map="x", params=nap, **made),
        node("c", "pairs", "x=a.y y=b.y", map=["x", "y"], **made),
        node("d", "summed", "x=c.y", map="x"),
        y="d.y",
    ) | {"limits": limits}


def stepped(job: Any, ctx: Any) -> Any:
    while ctx.result is None:
        job.step(ctx)
    return ctx.result


each_kind = pytest.mark.parametrize("kind", ["cpu", pytest.param("sim", marks=pytest.mark.sim)])


@each_kind
def test_graph_completes_in_a_quarter_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(runner, "BURST_S", -1.0)
    expected = ran(large(), kind)
    job = loaded(large(memory_bytes=BUDGET), kind, host_bytes=64 * MB).begin({})
    ctx = context(kind)
    while ctx.result is None:
        job.step(ctx)
        assert on_device(job) <= BUDGET
    assert ctx.result == expected
    assert BUDGET - MB <= job.room.peak_bytes <= BUDGET
    assert job.room.out_bytes >= (2 * COUNT * MB - BUDGET) // 2


@pytest.mark.parametrize(("count", "room"), [(32, 8), (12, 3), (16, 10)])
def test_no_more_bytes_come_back_than_with_foresight(count: int, room: int) -> None:
    job = loaded(large(count=count, memory_bytes=room * MB), host_bytes=64 * MB).begin({})
    stepped(job, context())
    assert job.room.in_bytes == belady(count, room) * MB


def belady(count: int, room: int) -> int:
    """How many blocks of `large` must come back, by Belady's rule."""
    numbers = range(count)
    nodes = [((), (f"a{n}",)) for n in numbers] + [((f"a{n}",), (f"b{n}",)) for n in numbers]
    nodes += [((f"a{n}", f"b{n}"), (f"c{n}",)) for n in numbers]
    nodes += [((f"c{n}",), ()) for n in numbers]
    here, moved = set[str](), 0
    for at, (reads, writes) in enumerate(nodes):
        later = {block: n for n in reversed(range(at, len(nodes))) for block in nodes[n][0]}
        moved += len(set(reads) - here)
        here = {block for block in here if block in later} | {*reads, *writes}
        while len(here) > room:
            here.remove(max(here - {*reads, *writes}, key=later.__getitem__))
    return moved


def on_device(job: Any) -> int:
    lying = job.room._survey((), ((None, value) for value in job._values()))
    return sum(one.size for one in lying if not job.room._is_aside(one.storage))


def test_block_read_last_is_spilled_first() -> None:
    room = SpillBudget(3 * MB, 64 * MB, Accelerator("cpu"))
    first, second, third = (torch.full((SIZE,), float(n)) for n in range(3))
    room.make([third], [(30, first), (20, second), (10, third)], MB)
    assert (aside(room, first), aside(room, second), aside(room, third)) == (True, False, False)
    room.make([first], [(10, first), (20, second), (30, third)], MB)
    assert (aside(room, first), aside(room, second), aside(room, third)) == (False, False, True)
    assert [t[0].item() for t in (first, second, third)] == [0.0, 1.0, 2.0]
    assert (room.out_bytes, room.in_bytes) == (2 * MB, MB)


def aside(room: SpillBudget, tensor: torch.Tensor) -> bool:
    return room._is_aside(tensor.untyped_storage())


def test_unchanged_restored_block_is_spilled_without_a_copy() -> None:
    room = SpillBudget(MB, 64 * MB, Accelerator("cpu"))
    one, other = torch.zeros(SIZE), torch.ones(SIZE)
    held = [(1, one), (2, other)]
    room.make([one], held, 0)  # the other goes
    room.make([other], held, 0)
    assert (room.out_bytes, room.in_bytes) == (2 * MB, MB)
    room.make([one], held, 0)  # the other lies there already
    assert (room.out_bytes, room.in_bytes) == (2 * MB, 2 * MB)
    room.forget(one)
    one += 5
    room.make([other], held, 0)
    assert (room.out_bytes, room.in_bytes) == (3 * MB, 3 * MB)
    room.make([one], held, 0)
    assert one[0].item() == 5.0


def test_views_and_shared_storages_survive_spilling() -> None:
    room = SpillBudget(2 * MB, 64 * MB, Accelerator("cpu"))
    model = torch.nn.Linear(512, 512)
    block = {"model": model, "row": model.weight.detach()[3], "opt": [model.weight]}
    expected = block["row"].clone()
    room.make([torch.zeros(SIZE)], [(5, block)], MB)
    assert aside(room, model.weight)
    assert model.weight.untyped_storage()._cdata == block["row"].untyped_storage()._cdata
    room.make([block], [(5, block)], 0)
    assert not aside(room, model.weight)
    with torch.no_grad():
        model.weight[3] += 1
    assert torch.equal(block["row"], expected + 1)
    assert model.weight.requires_grad
    assert model.weight.is_leaf


def test_bits_of_views_survive_spilling() -> None:
    room = SpillBudget(MB, 64 * MB, Accelerator("cpu"))
    whole = torch.complex(torch.ones(SIZE // 2), torch.full((SIZE // 2,), 2.0))
    block = [whole, whole.conj(), whole.conj().imag]
    room.make([torch.zeros(SIZE)], [(1, block)], 0)
    assert aside(room, whole)
    assert [tensor[0].item() for tensor in block] == [1 + 2j, 1 - 2j, -2.0]
    assert len({tensor.untyped_storage()._cdata for tensor in block}) == 1


@pytest.mark.parametrize(
    "odd",
    [
        torch.eye(300).to_sparse(),
        torch.nested.nested_tensor([torch.ones(200, 100)] * 2, layout=torch.jagged),
        torch.ones(SIZE).share_memory_(),
        torch.from_numpy(numpy.ones(SIZE)),
    ],
    ids=["sparse", "nested", "shared", "of numpy"],
)
def test_storage_that_cannot_be_replaced_stays(odd: torch.Tensor) -> None:
    room = SpillBudget(MB, 64 * MB, Accelerator("cpu"))
    room.make([torch.zeros(SIZE)], [(1, odd)], 0)
    room.forget(odd)
    assert room.held_bytes == 0


def test_holder_of_the_memory_itself_still_finds_the_bytes() -> None:
    """As an image does, while it is copied beside the next step."""
    room = SpillBudget(MB, 64 * MB, Accelerator("cpu"))
    one = torch.ones(SIZE)
    storage, address = one.untyped_storage(), one.data_ptr()
    room.make([torch.zeros(SIZE)], [(1, one)], 0)
    assert aside(room, one)
    assert storage.data_ptr() == address != one.data_ptr()
    assert storage[MB // 2 : MB // 2 + 4].tolist() == [0, 0, 128, 63]


def test_block_without_holders_is_forgotten() -> None:
    room = SpillBudget(MB, 64 * MB, Accelerator("cpu"))
    one = torch.zeros(SIZE)
    room.make([torch.zeros(SIZE)], [(1, one)], 0)
    assert room.held_bytes == MB
    del one
    assert room.held_bytes == 0


def test_node_that_needs_more_memory_than_there_is_says_so() -> None:
    merge = node("m", "total", "xs=a.y")
    parts = node("parts", "indices", writes="parts", params={"count": COUNT})
    a = node("a", "filled", "n=parts.parts", map="n", params={"size": SIZE})
    limited = body(parts, a, merge) | {"limits": {"memory_bytes": BUDGET}}
    job = loaded(limited, host_bytes=64 * MB).begin({})
    with pytest.raises(NodeFailed, match="node m") as failed:
        stepped(job, context())
    assert isinstance(failed.value.__cause__, NoRoom)
    assert f"it takes {COUNT * MB} bytes at once" in str(failed.value.__cause__)


def test_host_memory_for_spilling_is_bounded() -> None:
    job = loaded(large(memory_bytes=BUDGET), host_bytes=4 * MB).begin({})
    with pytest.raises(NodeFailed) as failed:
        stepped(job, context())
    assert "do not fit into 4194304 bytes of host memory" in str(failed.value.__cause__)


def test_room_is_made_for_what_a_node_declares_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []
    make = SpillBudget.make

    def noted(self: SpillBudget, needed: Any, held: Any, more: int, *, likely_bytes: int) -> None:
        seen.append((more, likely_bytes))
        make(self, needed, held, more, likely_bytes=likely_bytes)

    monkeypatch.setattr(SpillBudget, "make", noted)
    tensors = {"y": {"dtype": "float32", "shape": ["N"]}, "x": {"dtype": "float32", "shape": ["N"]}}
    a = node("a", "start", params={"size": SIZE})
    b = node("b", "double", "x=a.y", tensors=tensors, est={"memory_bytes": 5})
    job = loaded(body(a, b, node("c", "double", "x=b.y")) | {"limits": {"memory_bytes": BUDGET}})
    stepped(job.begin({}), context())
    # Of `b` N is not known yet, when it begins; of `c` is known what its function wrote before.
    assert seen == [(0, 0), (5, 0), (0, MB)]


def test_room_that_is_only_likely_needed_fails_no_node() -> None:
    room = SpillBudget(3 * MB, 64 * MB, Accelerator("cpu"))
    one, two = torch.zeros(SIZE), torch.ones(SIZE)
    room.make([two], [(1, one), (0, two)], MB, likely_bytes=5 * MB)
    assert (aside(room, one), room.peak_bytes) == (True, 3 * MB)


def test_nothing_is_searched_while_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    tidy = SpillBudget._tidy
    monkeypatch.setattr(SpillBudget, "_tidy", lambda room: (looked.append(1), tidy(room)))
    room, blocks = SpillBudget(4 * MB, 64 * MB, Accelerator("cpu")), list[torch.Tensor]()
    for n in range(6):
        room.make([], ((None, block) for block in blocks), 0)
        blocks.append(torch.full((SIZE,), float(n)))
        assert room.made(blocks[-1], ()) == MB
    assert len(looked) < 6  # the first time, and when more than the budget may lie there
    assert [aside(room, block) for block in blocks].count(True) == 1


@each_kind
@pytest.mark.parametrize("every", [1, 3, 7])
def test_graph_can_be_paused_while_blocks_are_spilled(
    every: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "BURST_S", -1.0)
    expected, ctx = ran(large(count=12), kind), context(kind)
    limited = large(count=12, memory_bytes=3 * MB)

    def anew() -> Loaded:
        return loaded(limited, kind, host_bytes=64 * MB)

    job = anew().begin({})
    for step in range(10_000):
        job.step(ctx)
        if ctx.result is not None:
            break
        if step % every == 0:
            before = on_device(job)
            job = anew().go_on(copy.deepcopy(job.state()))
            assert on_device(job) == before
    assert ctx.result == expected


# --- as the kernel sees it ----------------------------------------------------------------------


MEASURED = """
import json, sys
import torch
from tests.workers.graph.test_spill import BUDGET, MB, large
from tests.workers.graph.test_runner import context, loaded, nodes
from workers.residents.progress import anonymous_bytes

torch.set_num_threads(1)
most = 0
def watched(function):
    def call(ctx, **given):
        global most
        returned = function(ctx, **given)
        most = max(most, anonymous_bytes())
        return returned
    return call
for name in ("filled", "double", "pairs", "summed"):
    setattr(nodes, name, watched(getattr(nodes, name)))
limit = BUDGET if sys.argv[1] == "bounded" else 0
job = loaded(large(memory_bytes=limit), host_bytes=64 * MB).begin({})
ctx, base = context(), anonymous_bytes()
while ctx.result is None:
    job.step(ctx)
print(json.dumps(most - base))
"""


def test_kernel_counts_no_more_memory_than_the_budget() -> None:
    def grown(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, how],
            stdout=subprocess.PIPE,
            check=True,
            cwd=ROOT,
            # A heap that keeps nothing that was freed: residents' own grows by 64 MiB at once.
            env={"PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"},
        )
        return int(json.loads(done.stdout))

    assert grown("unbounded") > 2 * COUNT * MB * 0.9
    assert grown("bounded") < BUDGET + MB


# --- in a resident ------------------------------------------------------------------------------


@pytest.mark.parametrize("executors", [1, 2])
def test_graph_that_spills_is_paused_and_moved_in_a_resident(executors: int, rigs: Any) -> None:
    """Each executor has the budget for itself."""
    rig: DeviceRig = rigs(memory_bytes=256 * MB, host_memory_bytes=512 * MB)
    expected, images = ran(large()), list[dict[str, object]]()
    for epoch in range(1, 4):
        napping = large(nap_s=0.5)
        more = {"memory_bytes": BUDGET, "world_size": executors}
        launched(rig, "t1", napping, epoch, images=images, **more)
        if epoch < 3:
            rig.until(lambda: spilled(rig) > 0)
            with_code = max(one.memory_bytes for one in residents(rig))
            assert with_code < 2 * executors * BUDGET
            images = rig.paused_and_saved("t1", epoch)
            rig.drop.append(["t1", epoch])
            rig.until(lambda: not rig.supervisor.stays.residents)
    rig.event(Started, "t1", 3)
    rig.let_end("t1", 3)
    assert rig.event(Finished, "t1", 3).result == expected


def spilled(rig: DeviceRig) -> int:
    return sum(one.spilled_bytes for one in residents(rig))


def residents(rig: DeviceRig) -> list[Resident]:
    return list(rig.supervisor.stays.residents.values())
