"""What is captured comes back as it was, bit for bit; what cannot be is named with its path."""

from __future__ import annotations

import bz2
import contextlib
import csv
import enum
import functools
import gzip
import io
import itertools
import logging
import lzma
import os
import random
import socket
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from workers.capture import data_loader
from workers.capture.capture import (
    Captured,
    Surroundings,
    Uncapturable,
    capture,
)
from workers.capture.job_files import restore
from workers.capture.restore import rebuilt, return_to
from workers.hardware.accelerator import Accelerator

NOWHERE = Surroundings()
_accelerator = Accelerator("cpu")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the test's tensors lie on a device of this kind, which a job names as its default."""
    global _accelerator
    _accelerator = Accelerator(request.param)
    torch.set_default_device(request.param)
    yield
    torch.set_default_device(None)
    _accelerator = Accelerator("cpu")


def on_each_kind(test: Any) -> Any:
    """Run the test on the CPU and, with streams that run late, on a simulated accelerator."""
    kinds = ["cpu", pytest.param("sim", marks=pytest.mark.sim)]
    each = pytest.mark.parametrize("kind", kinds, indirect=True)
    return pytest.mark.usefixtures("kind")(each(test))


class Job:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def captured(job: Any, around: Surroundings = NOWHERE) -> Captured:
    return capture(job, around=around, accelerator=_accelerator)


def restored(image: Captured, around: Surroundings = NOWHERE) -> Any:
    """The job of an image, around private copies of its storages."""
    copies = [s.clone() for s in image.storages]
    world = rebuilt(memoryview(bytes(image.graph)), copies, around=around)
    return_to(world, _accelerator)
    return world["job"]


def there_and_back(job: Any, around: Surroundings = NOWHERE) -> Any:
    return restored(captured(job, around), around)


def refused(job: Any, around: Surroundings = NOWHERE) -> Uncapturable:
    with pytest.raises(Uncapturable) as caught:
        captured(job, around)
    return caught.value


# --- tensors and arrays ---------------------------------------------------------------------------


@on_each_kind
def test_shared_references_views_gradients_and_cycles_survive():
    base = torch.arange(12.0).reshape(3, 4)
    tied = torch.nn.Parameter(torch.randn(4, 4))
    tied.grad = torch.ones(4, 4)
    job = Job(base=base, column=base[:, 1], t=base.t(), a=tied, b=tied)
    job.me = job
    back = there_and_back(job)
    back.base[0, 1] = 99.0
    assert back.column[0] == 99.0
    assert back.t[1, 0] == 99.0
    assert back.t.stride() == base.t().stride()
    assert back.a is back.b
    assert torch.equal(back.a.grad, torch.ones(4, 4))
    assert isinstance(back.a, torch.nn.Parameter)
    assert back.me is back


@on_each_kind
def test_strided_tensors_keep_their_strides():
    storage = torch.arange(10.0)
    numbers = torch.randn(3, dtype=torch.complex64)
    job = Job(
        nothing=torch.empty(0, 3),
        scalar=torch.tensor(2.5, dtype=torch.bfloat16),
        same=torch.ones(1).expand(4, 5),
        window=storage[2:4],
        flip=numbers.conj(),
        imaginary=numbers.conj().imag,
        wants=torch.ones(2, requires_grad=True),
        frozen=torch.nn.Parameter(torch.ones(2), requires_grad=False),
        noted=torch.ones(2),
    )
    job.noted.note = job
    back = there_and_back(job)
    assert back.nothing.shape == (0, 3)
    assert back.scalar.dtype is torch.bfloat16
    assert back.same.stride() == (0, 0)
    assert back.same.untyped_storage().nbytes() == 4
    assert back.window.untyped_storage().nbytes() == 40
    assert torch.equal(back.window, storage[2:4])
    assert back.flip.is_conj()
    assert back.imaginary.is_neg()
    assert torch.equal(back.imaginary, job.imaginary)
    assert back.wants.requires_grad
    assert not back.frozen.requires_grad
    assert back.noted.note is back


def test_sparse_and_nested_tensors_keep_their_layout_and_their_gradients():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls both layouts experimental
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
        rows, columns = dense.to_sparse_csr(), dense.to_sparse_csc()
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    points = torch.nn.Parameter(dense.to_sparse())
    job = Job(points=points, rows=rows, columns=columns, nested=nested, jagged=jagged, table=table)
    back = there_and_back(job)
    assert isinstance(back.points, torch.nn.Parameter)
    assert back.points.requires_grad
    for name in ("points", "rows", "columns"):
        assert getattr(back, name).layout is getattr(job, name).layout
        assert torch.equal(getattr(back, name).to_dense(), dense)
    assert [len(part) for part in back.nested.unbind()] == [2, 3]
    assert [len(part) for part in back.jagged.unbind()] == [2, 3]
    assert back.table.weight.grad.is_sparse
    assert torch.equal(back.table.weight.grad.to_dense(), table.weight.grad.to_dense())


class Marked(torch.Tensor):
    """As tenants write them, to carry something along."""


class Weight(torch.nn.Parameter):
    pass


@on_each_kind
def test_subclasses_keep_their_class_attributes_and_gradient():
    weight = Weight(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    weight.sharded = True
    marked = torch.arange(3.0).as_subclass(Marked)
    marked.name_of_it = "x"
    job = Job(weight=weight, alias=weight.data, marked=marked)
    back = there_and_back(job)
    assert type(back.weight) is Weight
    assert back.weight.sharded
    assert back.weight.grad.tolist() == [3.0, 3.0]
    back.alias[0] = 5
    assert back.weight[0] == 5
    assert type(back.marked) is Marked
    assert back.marked.name_of_it == "x"


@on_each_kind
def test_tensor_in_a_plain_attribute_of_a_module_is_restored():
    net = torch.nn.Linear(2, 2)
    net.scale = torch.arange(3.0)
    assert torch.equal(there_and_back(Job(net=net)).net.scale, torch.arange(3.0))


@on_each_kind
def test_modules_that_compute_their_weights_do_so_after_a_restore():
    torch.manual_seed(0)
    job = Job(
        normed=parametrizations.weight_norm(torch.nn.Linear(3, 2)),
        spectral=parametrizations.spectral_norm(torch.nn.Linear(3, 2)),
        lazy=torch.nn.LazyLinear(2),
    )
    back = there_and_back(job)
    x = torch.ones(1, 3)
    assert torch.equal(back.normed(x), job.normed(x))
    assert parametrize.is_parametrized(back.normed, "weight")
    assert torch.equal(back.spectral(x), job.spectral(x))
    assert torch.nn.parameter.is_lazy(back.lazy.weight)
    assert back.lazy(x).shape == (1, 2)


def test_arrays_that_view_tensors_still_do():
    tensor, array = torch.zeros(6), np.zeros((2, 3), order="F")
    job = Job(
        tensor=tensor,
        window=tensor.numpy()[2:4],
        array=array,
        seen_as_tensor=torch.from_numpy(array),
        frozen=np.frombuffer(b"abcd", np.uint8),
        words=np.array(["a", {"b": 1}], dtype=object),
    )
    back = there_and_back(job)
    back.tensor[2] = 5
    back.array[1, 2] = 7
    assert back.window[0] == 5
    assert back.seen_as_tensor[1, 2] == 7
    assert back.array.flags.f_contiguous
    assert bytes(back.frozen) == b"abcd"
    assert not back.frozen.flags.writeable
    assert back.words[1] == {"b": 1}
    back = there_and_back(back)  # and an image of what was restored keeps it
    back.array[0, 0] = -1
    assert back.seen_as_tensor[0, 0] == -1


@on_each_kind
def test_bytes_of_arrays_and_tensors_are_not_in_the_pickled_graph():
    job = Job(
        tensor=torch.zeros(250_000),
        array=np.zeros(250_000),
        read=np.frombuffer(bytes(1_000_000), np.uint8),
    )
    assert len(captured(job).graph) < 20_000  # mostly the states of three random generators


def test_shared_memory_is_shared_again():
    back = there_and_back(Job(flag=torch.zeros(3).share_memory_(), mine=torch.zeros(3)))
    assert back.flag.is_shared()
    assert not back.mine.is_shared()


def test_packed_sequence_is_restored():
    rnn = torch.nn.GRU(2, 3)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    back = there_and_back(Job(rnn=rnn, packed=packed))
    assert torch.equal(back.rnn(back.packed)[1], rnn(packed)[1])


@on_each_kind
def test_tensors_are_listed_under_their_attribute_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD([model[0].weight], 0.1, momentum=0.9)
    model[0].weight.grad = torch.ones(3, 2)
    optimizer.step()
    whole = torch.arange(6.0).reshape(2, 3)
    job = Job(
        model=model, opt=optimizer, tied=model[0].weight, parts={"row": whole[1]}, a=[np.ones(2)]
    )
    image = captured(job)
    assert {name: row[1:4] for name, row in image.tensors.items()} == {
        "model.0.weight": ["float32", (3, 2), (2, 1)],
        "tied": ["float32", (3, 2), (2, 1)],
        "model.1.weight": ["float32", (3,), (1,)],
        "model.1.bias": ["float32", (3,), (1,)],
        "model.1.running_mean": ["float32", (3,), (1,)],
        "model.1.running_var": ["float32", (3,), (1,)],
        "model.1.num_batches_tracked": ["int64", (), ()],
        "opt.state.0.momentum_buffer": ["float32", (3, 2), (2, 1)],
        "parts.row": ["float32", (3,), (1,)],
        "a.0": ["float64", (2,), (1,)],
    }
    assert image.tensors["tied"] == image.tensors["model.0.weight"]
    number, *_, offset = image.tensors["parts.row"]
    assert offset == 3
    assert image.storages[number].data_ptr() == whole.untyped_storage().data_ptr()


def test_memory_partly_shared_with_an_array_is_refused():
    array = np.zeros(10)
    assert "share" in refused(Job(a=array, t=torch.from_numpy(array[5:]))).what


# --- randomness -----------------------------------------------------------------------------------


@on_each_kind
def test_every_random_generator_continues_where_it_was():
    job = Job(
        own=torch.Generator(_accelerator.device).manual_seed(3),
        rng=np.random.default_rng(4),
        old=np.random.RandomState(5),
        dice=random.Random(6),
        torchs=torch.default_generator,
        numpys=np.random.mtrand._rand,  # as scikit-learn's check_random_state gives it
        draw=random.random,
    )

    def draw(job: Any) -> list[float]:
        return [
            torch.rand(1).item(),
            random.random(),
            np.random.rand(),
            torch.rand(1, generator=job.own).item(),
            job.rng.random(),
            job.old.rand(),
            job.dice.random(),
            torch.rand(1, generator=job.torchs, device="cpu").item(),
            job.numpys.rand(),
            job.draw(),
        ]

    draw(job)
    with torch.random.fork_rng():
        image = captured(job)
        expected = [draw(job), draw(job)]
    back = restored(image)
    assert [draw(back), draw(back)] == expected
    assert back.torchs is torch.default_generator


@on_each_kind
def test_process_wide_settings_of_a_job_are_set_again():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    image = captured(Job())
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    try:
        restored(image)
        assert not torch.is_grad_enabled()
        assert torch.ones(1).dtype is torch.float64
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


# --- hooks, optimizers, schedules -----------------------------------------------------------------


@on_each_kind
def test_an_optimizer_keeps_its_parameters_hooks_and_schedule():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    job = Job(model=model, optimizer=optimizer, calls=[])
    job.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.5**e)
    job.handle = optimizer.register_step_post_hook(lambda *_: job.calls.append(1))
    optimizer.note = "mine"

    def step(job: Any) -> None:
        job.model(torch.ones(1, 2)).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.schedule.step()

    back = there_and_back(job)  # before the first step: torch would warn if it forgot to count it
    step(back)
    step(job)
    back = there_and_back(job)
    assert back.optimizer.note == "mine"
    step(job)
    step(back)
    assert torch.equal(job.model.weight, back.model.weight)
    assert back.optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]
    assert len(back.calls) == 2
    back.handle.remove()
    step(back)
    assert len(back.calls) == 2


@on_each_kind
def test_hooks_of_tensors_and_modules_are_called_and_can_be_removed():
    net = torch.nn.Linear(2, 1, bias=False)
    job = Job(net=net, seen=[])
    job.handles = {
        "tensor": net.weight.register_hook(lambda grad: grad * 2),
        "after": net.weight.register_post_accumulate_grad_hook(lambda _: job.seen.append("after")),
        "forward": net.register_forward_hook(lambda *_: job.seen.append("forward")),
        "backward": net.register_full_backward_hook(lambda *_: job.seen.append("backward")),
        "state": net.register_state_dict_post_hook(lambda *_: job.seen.append("state")),
    }
    back = there_and_back(job)

    def run() -> list[str]:
        back.seen.clear()
        back.net.weight.grad = None
        back.net(torch.ones(1, 2, requires_grad=True)).sum().backward()
        back.net.state_dict()
        return sorted(back.seen)

    assert run() == ["after", "backward", "forward", "state"]
    assert back.net.weight.grad.tolist() == [[2.0, 2.0]]
    for handle in back.handles.values():
        handle.remove()
    assert run() == []
    assert back.net.weight.grad.tolist() == [[1.0, 1.0]]


@on_each_kind
def test_later_hook_does_not_displace_an_earlier_one():
    net = torch.nn.Linear(1, 1)
    net.register_forward_hook(lambda *_: None)
    image = captured(Job(net=net))
    torch.utils.hooks.RemovableHandle.next_id = 0  # as in a fresh process
    back = restored(image)
    back.net.register_forward_hook(lambda *_: None)
    assert len(back.net._forward_hooks) == 2


@on_each_kind
def test_gradient_scaler_autocast_and_averaged_weights_are_restored():
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    job = Job(net=net, opt=torch.optim.SGD(net.parameters(), 0.1))
    job.scaler = torch.amp.GradScaler(_accelerator.kind, init_scale=64.0, growth_interval=2)
    job.cast = torch.autocast(_accelerator.kind, torch.bfloat16)
    job.mean = torch.optim.swa_utils.AveragedModel(net)

    def step(job: Any) -> torch.Tensor:
        with job.cast:
            loss = job.net(torch.ones(2, 4)).square().mean()
        job.scaler.scale(loss).backward()
        job.scaler.step(job.opt)
        job.scaler.update()
        job.opt.zero_grad()
        job.mean.update_parameters(job.net)
        return loss.detach()

    step(job)
    back = there_and_back(job)
    assert [step(back) for _ in range(3)] == [step(job) for _ in range(3)]
    assert back.scaler.get_scale() == job.scaler.get_scale() == 256.0
    assert torch.equal(back.mean.module.weight, job.mean.module.weight)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


@on_each_kind
@pytest.mark.parametrize("how", ["module", "in place", "function"])
def test_compiled_module_is_compiled_again(how: str) -> None:
    torch.manual_seed(0)
    net = Net()
    job = Job(net=net, seen=[])
    if how == "module":
        job.net = torch.compile(net, backend="aot_eager")
        job.net.register_forward_hook(lambda *_: job.seen.append("forward"))
    elif how == "in place":
        net.compile(backend="aot_eager")
    else:
        job.net = torch.compile(lambda x: (x * 2).relu(), backend="aot_eager")
    expected = job.net(torch.ones(1, 3))
    back = there_and_back(job)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(back.net(torch.ones(1, 3)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(back.seen) == (2 if how == "module" else 0)


# --- ordinary Python ------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True, slots=True)
class Point:
    x: int


def test_iterators_continue_where_they_were():
    numbers = [1, 2, 3, 4, 5]
    job = Job(
        list=iter(numbers),
        dict=iter({"a": 1, "b": 2, "c": 3}.items()),
        zip=zip(numbers, itertools.count(7), strict=False),
        pairs=enumerate(numbers),
        squares=map(functools.partial(pow, exp=2), numbers),
        odd=filter(lambda n: n % 2, numbers),
        backwards=reversed(numbers),
        range=iter(range(5)),
        cycle=itertools.cycle(numbers),
        chain=itertools.chain(numbers, numbers),
        islice=itertools.islice(numbers, 1, None, 2),
        both=itertools.product([1, 2], "ab"),
    )
    parts = list(vars(job))
    for name in parts:
        next(getattr(job, name))
    back = there_and_back(job)
    for name in parts:
        assert next(getattr(back, name)) == next(getattr(job, name)), name


@on_each_kind
def test_ordinary_objects_come_back():
    def local(x: int) -> int:
        return x + offset

    offset = 3
    job = Job(
        colour=Colour.RED,
        point=Point(2),
        function=local,
        cached=functools.lru_cache(maxsize=2)(local),
        log=logging.getLogger("a.b"),
        lock=threading.Lock(),
        rlock=threading.RLock(),
        condition=threading.Condition(),
        event=threading.Event(),
    )
    job.event.set()
    job.table = {"a": 1}
    job.views = (job.table.keys(), job.table.values(), job.table.items())
    job.shown = types.MappingProxyType(job.table)
    back = there_and_back(job)
    back.table["b"] = 2
    assert [len(view) for view in (*back.views, back.shown)] == [2, 2, 2, 2]
    assert back.colour is Colour.RED
    assert back.point == Point(2)
    assert back.function(1) == back.cached(1) == 4
    assert back.log is job.log
    assert back.lock is not job.lock
    assert back.lock.acquire(blocking=False)
    assert back.rlock.acquire(blocking=False)
    assert back.event.is_set()
    with back.condition:
        assert not back.condition.wait(timeout=0)


def test_weak_references_lead_to_objects_that_the_job_holds():
    child = Job()
    job = Job(child=child, first=weakref.ref(child), gone=weakref.ref(Job()))
    child.parent, child.me = weakref.ref(job), weakref.ref(child)
    job.by_key = weakref.WeakKeyDictionary({child: 1})
    job.by_name = weakref.WeakValueDictionary({"c": child})
    job.some, job.proxy = weakref.WeakSet([child]), weakref.proxy(child)
    job.method = weakref.WeakMethod(child.__init__)
    back = there_and_back(job)
    assert back.first() is back.child
    assert back.child.parent() is back
    assert back.child.me() is back.child
    assert back.gone() is None
    assert back.by_key[back.child] == 1
    assert back.by_name["c"] is back.child
    assert back.child in back.some
    assert back.proxy.me() is back.child
    assert back.method().__self__ is back.child
    del back.child
    assert len(back.by_key) == 0


def test_objects_of_the_process_are_found_in_the_new_process():
    here, there = Job(), Job()
    job = Job(ctx=here, log=here.__dict__, out=sys.stdout)
    back = restored(captured(job, Surroundings(ctx=here)), Surroundings(ctx=there))
    assert back.ctx is there
    assert back.out is sys.stdout


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path) -> Surroundings:
    for name in ("code", "scratch"):
        (tmp_path / name).mkdir()
    return Surroundings(code=tmp_path / "code", scratch=tmp_path / "scratch")


def test_open_files_are_read_on_where_they_were(scratch, tmp_path):
    (scratch.code / "data.txt").write_text("one\nzwö\nthree\n")
    for opener, name in ((gzip.open, "a.gz"), (bz2.open, "a.bz2"), (lzma.open, "a.xz")):
        with opener(scratch.code / name, "wb") as out:
            out.write(b"one\ntwo\nthree\n")
    memory = io.BytesIO(b"abc")
    memory.read(1)
    job = Job(
        text=(scratch.code / "data.txt").open(encoding="utf-8"),
        raw=(scratch.code / "data.txt").open("rb"),
        packed=[gzip.open(scratch.code / "a.gz", "rt")],  # noqa: SIM115
        memory=memory,
    )
    job.packed += [bz2.open(scratch.code / "a.bz2"), lzma.open(scratch.code / "a.xz")]  # noqa: SIM115
    job.under = job.text.buffer
    with contextlib.ExitStack() as files:
        for file in (job.text, job.raw, *job.packed):
            files.enter_context(file)
            file.readline()
        job.text.read(2)
        image = captured(job, scratch)
    moved = Surroundings(code=scratch.code.rename(tmp_path / "elsewhere"), scratch=scratch.scratch)
    back = restored(image, moved)
    with contextlib.ExitStack() as files:
        for file in (back.text, back.raw, *back.packed):
            files.enter_context(file)
        assert back.text.read() == "ö\nthree\n"
        assert back.text.mode == "r"
        assert back.under is back.text.buffer
        assert back.raw.readline() == "zwö\n".encode()
        assert [file.readline() for file in back.packed] == ["two\n", b"two\n", b"two\n"]
    assert back.memory.read() == b"bc"


def test_working_folder_is_restored(scratch, tmp_path):
    folder = scratch.scratch
    (folder / "kept").mkdir()
    (folder / "kept" / "a").write_bytes(b"abc")
    (folder / "empty").touch()
    (folder / "link").symlink_to("kept/a")
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o500)
    os.utime(folder / "kept" / "a", ns=(10**18, 10**18 + 1))
    image = captured(Job(), scratch)
    (folder / "kept" / "a").write_bytes(b"changed later")
    (folder / "later").mkdir()
    (folder / "later" / "b").touch()
    (folder / "empty").unlink()
    for _ in range(2):  # here, where it went on, and in an empty one
        restored(image, Surroundings(scratch=folder))
        assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) == [
            *("empty", "kept", "kept/a", "link", "run"),
        ]
        assert (folder / "link").read_bytes() == b"abc"
        assert (folder / "kept" / "a").stat().st_mtime_ns == 10**18 + 1
        assert (folder / "run").stat().st_mode & 0o777 == 0o500
        folder = tmp_path / "new"
        folder.mkdir(exist_ok=True)


def test_ranks_of_a_host_restore_their_folders_side_by_side(tmp_path):
    """The first of them does; what it has open then stays what it is."""
    around, long_ago = Surroundings(scratch=tmp_path), 10**18
    storages = [torch.UntypedStorage(1000).fill_(n) for n in range(2)]
    entries = [
        ("a", 0o600, long_ago, 0, None),
        ("below", 0o700, long_ago, None, None),
        ("below/c", 0o600, long_ago, 1, None),
        ("link", 0o777, long_ago, None, "a"),
    ]

    def restored_by(_: int) -> int:
        restore(entries, storages, around)
        return (tmp_path / "a").stat().st_ino

    for changed in (b"", b"as long" * 142 + b"as long"[:6], b"longer" * 1000):
        with ThreadPoolExecutor(4) as ranks:
            assert len({*ranks.map(restored_by, range(12))}) == 1
        assert (tmp_path / "link").read_bytes() == bytes(1000)
        assert (tmp_path / "below" / "c").read_bytes() == b"\1" * 1000
        (tmp_path / "a").write_bytes(changed)
        os.utime(tmp_path / "a", ns=(long_ago, long_ago))  # as of one that was mapped
        (tmp_path / "later").touch(exist_ok=True)


def test_open_output_files_are_written_on_in_the_working_folder(scratch):
    folder = scratch.scratch
    job = Job(
        log=(folder / "log").open("a"),
        out=(folder / "out").open("wb"),
        table=(folder / "table").open("w+"),
        fresh=(folder / "fresh").open("x"),
    )
    job.handler = logging.FileHandler(folder / "own.log")
    job.logger = logging.getLogger("tests.capture.own")
    job.logger.addHandler(job.handler)

    def step(job: Any, what: str) -> None:
        for file in (job.log, job.table, job.fresh):
            file.write(what)
        job.out.write(what.encode())
        job.logger.warning(what)

    def close(job: Any) -> None:
        for file in (job.log, job.out, job.table, job.fresh, job.handler):
            file.close()

    job.table.write("xxxxxx")
    job.table.seek(2)
    step(job, "1")
    image = captured(job, scratch)
    step(job, "lost")
    close(job)
    back = restored(image, scratch)
    step(back, "2")
    assert back.out.mode == "wb"
    assert not back.out.readable()
    close(back)
    job.logger.handlers.clear()
    read = {path.name: path.read_text() for path in folder.iterdir()}
    assert read == {
        "log": "12",
        "out": "12",
        "table": "xx12xx",
        "fresh": "12",
        "own.log": "1\n2\n",
    }


@on_each_kind
def test_memory_mapped_files_are_mapped_again(scratch):
    np.arange(10, dtype=np.uint16).tofile(scratch.code / "tokens.bin")
    read = np.memmap(scratch.code / "tokens.bin", np.uint16, "r", offset=4, shape=(2, 4))
    written = np.memmap(scratch.scratch / "seen.bin", np.int64, "w+", shape=3)
    job = Job(read=read, part=read[1, 1:], plain=np.asarray(read)[0], written=written)
    written[1] = 7
    image = captured(job, scratch)
    assert image.storages[-1].tolist()[8] == 7
    written[1] = 8
    back = restored(image, scratch)
    assert back.part.tolist() == [7, 8, 9]
    assert back.plain.tolist() == [2, 3, 4, 5]
    assert isinstance(back.part, np.memmap)
    assert type(back.plain) is np.ndarray
    assert back.written.tolist() == [0, 7, 0]
    back.written[0] = 5
    assert np.fromfile(scratch.scratch / "seen.bin", np.int64)[0] == 5


def test_unchanged_files_are_not_read_again(scratch):
    path = scratch.scratch / "a"
    path.write_bytes(b"abc")
    os.utime(path, (1, 1))
    first = captured(Job(), scratch)
    time.sleep(0.12)  # its status changed only now, and a file system's clock ticks coarsely
    second, third = captured(Job(), scratch), captured(Job(), scratch)
    path.write_bytes(b"abd")
    fourth = captured(Job(), scratch)
    data = [image.storages[-1].data_ptr() for image in (second, third, fourth)]
    assert data[0] == data[1] != data[2]
    assert bytes(fourth.storages[-1].tolist()) == b"abd"
    assert bytes(first.storages[-1].tolist()) == b"abc"


def test_a_working_folder_that_is_too_large_is_refused(scratch):
    (scratch.scratch / "big.bin").write_bytes(bytes(11))
    scratch.scratch_limit_bytes = 10
    error = refused(Job(), scratch)
    assert error.path == "working folder/big.bin"
    assert "10 bytes" in error.what


def test_value_for_another_task_has_no_working_folder_and_no_random_state(scratch):
    (scratch.scratch / "mine").touch()
    image = capture({"a": 1}, around=scratch, accelerator=_accelerator, whole=False)
    (scratch.scratch / "theirs").touch()
    assert rebuilt(memoryview(bytes(image.graph)), [], around=scratch) == {"job": {"a": 1}}
    assert image.storages == []
    assert (scratch.scratch / "theirs").exists()


# --- what is refused ------------------------------------------------------------------------------


def _numbers() -> Iterator[int]:
    return (i for i in range(3))


def _keeping(thing: Any) -> Any:
    return lambda: thing


def _held() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _with_hook() -> Any:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.register_hook(_keeping(_numbers()))
    return weight


def _with_node() -> Any:
    weight = torch.ones(1, requires_grad=True)
    return (weight * 2).grad_fn


@pytest.mark.parametrize(
    ("make", "path", "what"),
    [
        (lambda: Job(data=Job(_it=_numbers())), "job.data._it", "generator"),
        (lambda: Job(zipped=zip(iter([1]), _numbers(), strict=True)), "job.zipped", "generator"),
        (lambda: Job(locks=[1, {"a": _held()}]), "job.locks[1]['a']", "lock that is held"),
        (lambda: Job(thread=threading.Thread()), "job.thread", "thread"),
        (lambda: Job(weak=weakref.ref(NOWHERE)), "job.weak", "does not hold"),
        (lambda: Job(out=torch.nn.Linear(1, 1)(torch.ones(1))), "job.out", "live autograd"),
        (lambda: Job(node=_with_node()), "job.node", "MulBackward0"),
        (lambda: Job(call=_keeping(_numbers())), "job.call.<thing>", "generator"),
        (lambda: Job(weight=_with_hook()), "job.weight", "generator"),
        (lambda: Job(rows=csv.reader(["a,b"])), "job.rows", "reader"),
        (lambda: Job(store=torch.distributed.HashStore()), "job.store", "HashStore"),
    ],
)
def test_object_that_cannot_be_captured_is_named_with_its_path(make, path, what):
    error = refused(make())
    assert error.path.startswith(path)
    assert what in error.what
    assert error.advice


def test_file_that_cannot_be_opened_again_is_refused(scratch, tmp_path):
    with contextlib.ExitStack() as files:

        def opened(file: Any) -> Any:
            return files.enter_context(file)

        (tmp_path / "lines").write_text("a\nb\n")
        looped = opened((tmp_path / "lines").open())
        next(looped)
        cases = {
            "outside": opened((tmp_path / "out").open("w")),
            "packed": opened(gzip.open(scratch.scratch / "a.gz", "wb")),  # noqa: SIM115
            "unnamed": opened(os.fdopen(os.dup(1), "wb")),
            "looped": looped,
            "net": opened(socket.socket()),
        }
        found = {name: refused(Job(**{name: file}), scratch) for name, file in cases.items()}
    closed = refused(Job(closed=cases["outside"]), scratch)
    for name, error in {**found, "closed": closed}.items():
        assert error.path.startswith(f"job.{name}")
    assert "outside the working folder" in found["outside"].what
    assert "readline" in found["looped"].advice


def test_iterator_made_before_loaders_are_tracked_is_refused():
    batches = torch.utils.data.dataloader._SingleProcessDataLoaderIter(
        torch.utils.data.DataLoader([1, 2, 3])  # type: ignore[arg-type]
    )
    assert refused(Job(it=batches)).path == "job.it"


# --- loaders --------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws from every source that a transform may draw from."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), torch.rand(1).item(), np.random.rand()]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Own(torch.utils.data.Sampler[int]):
    """As tenants write them: draws when it is asked, from what others draw from as well."""

    def __len__(self) -> int:
        return 21

    def __iter__(self) -> Iterator[int]:
        for _ in range(21):
            yield random.randrange(21)


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(21))


class Stateful(torch.utils.data.IterableDataset[int]):
    """Keeps its position as torchdata asks for it."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 21:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Generating(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(21)


class Loaded:
    """A job that keeps the iterator of a plain loader, and begins a new epoch when it ends."""

    def __init__(self, **options: Any) -> None:
        size = 1 if "batch_sampler" in options else 4
        data = options.pop("data", Noisy())
        self.loader: Any = torch.utils.data.DataLoader(data, size, **options)
        self.it = iter(self.loader)

    def step(self) -> Any:
        torch.rand(1)  # the model draws as well
        random.random()
        try:
            return next(self.it)
        except StopIteration:
            self.it = iter(self.loader)
            return next(self.it)

    def close(self) -> None:
        if hasattr(self.it, "_shutdown_workers"):
            self.it._shutdown_workers()


@pytest.fixture
def followed() -> Iterator[None]:
    plain = torch.utils.data.DataLoader._get_iterator
    data_loader.follow()
    yield
    torch.utils.data.DataLoader._get_iterator = plain


def _seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _batches(make: Any, steps: int, stops: tuple[int, ...]) -> tuple[list[Any], Any]:
    """What a job loads when it is captured and restored at `stops`; and what it draws after."""
    _seeded(1)
    job, seen = make(), []
    for number in range(steps):
        seen.append(job.step())
        if number in stops:
            image = captured(job)
            job.close()
            _seeded(99)
            job = restored(image)
    job.close()
    return seen, (torch.rand(1), random.random(), np.random.rand())


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


EVERY_WAY: dict[str, Any] = {
    "in order": lambda: {},
    "shuffled": lambda: {"shuffle": True},
    "a generator of its own": lambda: {"shuffle": True, "generator": torch.Generator()},
    "with replacement": lambda: {
        "sampler": torch.utils.data.RandomSampler(
            Noisy(), replacement=True, generator=torch.Generator()
        )
    },
    "a tenant's sampler": lambda: {"sampler": Own()},
    "a list of batches": lambda: {"batch_sampler": [[0, 1], [2, 3, 4], [5], [6], [7], [8]]},
    "an iterable": lambda: {"data": Numbers()},
}


@pytest.mark.usefixtures("followed")
@pytest.mark.parametrize("how", EVERY_WAY)
def test_data_loader_continues_at_the_next_batch(how: str) -> None:
    def make() -> Loaded:
        return Loaded(**EVERY_WAY[how]())

    expected, drawn = _batches(make, 14, ())
    seen, drawn_then = _batches(make, 14, (0, 2, 3, 4, 5, 6, 11))  # 5 and 11 end an epoch
    assert _same(seen, expected)
    assert drawn_then == drawn


class Dicing(torch.utils.data.Sampler[int]):
    """Draws at every index, from the generator that the job draws from, too."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(40):
            yield random.randrange(9)

    def __len__(self) -> int:
        return 40


@pytest.mark.usefixtures("followed")
def test_sampler_that_draws_at_every_batch_is_followed_for_so_many_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_loader, "DRAWS_LIMIT", 5)
    job = Loaded(sampler=Dicing())
    for _ in range(3):
        job.step()
    captured(job)
    for _ in range(4):
        job.step()
    error = refused(job)
    assert "Dicing draws random numbers at every batch" in error.what
    assert "a generator of its own" in error.advice


@pytest.mark.usefixtures("followed")
@pytest.mark.parametrize("kept", [False, True])
def test_loader_processes_continue_with_their_random_numbers(kept: bool) -> None:
    def make() -> Loaded:
        return Loaded(num_workers=2, shuffle=True, persistent_workers=kept)

    expected, drawn = _batches(make, 9, ())
    seen, drawn_then = _batches(make, 9, (0, 3, 6))
    assert _same(seen, expected)
    assert drawn_then == drawn


@pytest.mark.usefixtures("followed")
@pytest.mark.parametrize(
    ("data", "options"),
    [(Noisy, {"shuffle": True}), (Stateful, {}), (Stateful, {"num_workers": 2})],
)
def test_stateful_loader_of_torchdata_continues(data: Any, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader

        class Kept(Loaded):
            def __init__(self) -> None:
                self.loader = StatefulDataLoader(data(), 4, **options)
                self.it = iter(self.loader)

        expected, drawn = _batches(Kept, 9, ())
        seen, drawn_then = _batches(Kept, 9, (0, 3, 6))
    assert _same(seen, expected)
    assert drawn_then == drawn


@pytest.mark.usefixtures("followed")
def test_data_set_that_cannot_be_tracked_is_refused() -> None:
    generating = Loaded(data=Generating())
    error = refused(generating)
    assert error.path.startswith("job.it.")
    assert "generator" in error.what
    apart = Loaded(data=Numbers(), num_workers=1)
    error = refused(apart)
    apart.close()
    assert error.path == "job.it"
    assert "num_workers=0" in error.advice


@pytest.mark.usefixtures("followed")
def test_sampler_that_gives_another_order_is_detected() -> None:
    global _elsewhere
    _elsewhere = 0
    job = Loaded(sampler=Fickle())
    job.step()
    image = captured(job)
    _elsewhere = 1
    back = restored(image)
    with pytest.raises(RuntimeError, match="Fickle gave other indices"):
        back.step()


_elsewhere = 0


class Fickle(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(_elsewhere, 20)
