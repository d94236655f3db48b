"""An image is the job: what is captured comes back as it was, and what cannot be is named."""

from __future__ import annotations

import gzip
import io
import random
import socket
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workers import checkpoint, context_switch
from workers.accelerator import Accelerator
from workers.capture import Surroundings, Uncapturable

CPU = Accelerator("cpu")


class Job:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def there_and_back(
    job: Any, tmp_path: Path, around: Surroundings | None = None, step: int = 3
) -> Any:
    around = around or Surroundings()
    image = context_switch.stage(job, step=step, around=around, accelerator=CPU)
    checkpoint.save(image, tmp_path / "image")
    loaded = checkpoint.load(tmp_path / "image")
    assert loaded.step == step
    assert loaded.fingerprint == image.fingerprint
    return context_switch.restore(loaded, around=around, accelerator=CPU)


def refused(job: Any, around: Surroundings | None = None) -> Uncapturable:
    with pytest.raises(Uncapturable) as caught:
        context_switch.stage(job, step=1, around=around or Surroundings(), accelerator=CPU)
    return caught.value


def test_ties_views_gradients_and_cycles_survive(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tied = torch.nn.Parameter(torch.randn(4, 4))
    tied.grad = torch.ones(4, 4)
    job = Job(
        base=base,
        column=base[:, 1],
        t=base.t(),
        a=tied,
        b=tied,
        flip=base.to(torch.complex64).conj(),
    )
    job.me = job
    back = there_and_back(job, tmp_path)
    back.base[0, 1] = 99.0
    assert back.column[0] == 99.0
    assert back.t[1, 0] == 99.0
    assert back.t.stride() == base.t().stride()
    assert back.a is back.b
    assert torch.equal(back.a.grad, torch.ones(4, 4))
    assert isinstance(back.a, torch.nn.Parameter)
    assert back.flip.is_conj()
    assert back.me is back


def test_arrays_that_look_into_tensors_still_do(tmp_path):
    tensor, array = torch.zeros(6), np.zeros((2, 3), order="F")
    job = Job(
        tensor=tensor,
        window=tensor.numpy()[2:4],
        array=array,
        seen_as_tensor=torch.from_numpy(array),
        frozen=np.frombuffer(b"abcd", np.uint8),
        words=np.array(["a", {"b": 1}], dtype=object),
    )
    back = there_and_back(job, tmp_path)
    back.tensor[2] = 5
    back.array[1, 2] = 7
    assert back.window[0] == 5
    assert back.seen_as_tensor[1, 2] == 7
    assert back.array.flags.f_contiguous
    assert bytes(back.frozen) == b"abcd"
    assert back.words[1] == {"b": 1}


def test_an_image_of_a_restored_job_keeps_the_aliases(tmp_path):
    array = np.arange(4.0)
    job = Job(array=array, tensor=torch.from_numpy(array))
    (tmp_path / "2").mkdir()
    back = there_and_back(there_and_back(job, tmp_path), tmp_path / "2")
    back.array[0] = -1
    assert back.tensor[0] == -1


def test_an_image_does_not_change_when_the_job_goes_on(tmp_path):
    job = Job(weight=torch.zeros(3), array=np.zeros(3))
    image = context_switch.stage(job, step=1, around=Surroundings(), accelerator=CPU)
    job.weight += 1
    job.array += 1
    back = context_switch.restore(image, around=Surroundings(), accelerator=CPU)
    assert back.weight.sum() == back.array.sum() == 0


def test_every_source_of_randomness_goes_on_where_it_was(tmp_path):
    job = Job(own=torch.Generator().manual_seed(3), rng=np.random.default_rng(4))

    def draw(job: Any) -> list[float]:
        return [
            torch.rand(1).item(),
            random.random(),
            np.random.rand(),
            torch.rand(1, generator=job.own).item(),
            job.rng.random(),
        ]

    draw(job)
    around = Surroundings()
    image = context_switch.stage(job, step=1, around=around, accelerator=CPU)
    expected = [draw(job), draw(job)]
    back = context_switch.restore(image, around=around, accelerator=CPU)
    assert [draw(back), draw(back)] == expected


def test_an_optimizer_keeps_its_parameters_hooks_and_schedule(tmp_path):
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

    step(job)
    back = there_and_back(job, tmp_path)
    assert back.optimizer.note == "mine"
    step(job)
    step(back)
    assert torch.equal(job.model.weight, back.model.weight)
    assert back.optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]


def test_files_are_opened_again_where_they_were(tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    (code / "data.txt").write_text("one\ntwo\nthree\n")
    memory = io.BytesIO(b"abc")
    memory.read(1)
    job = Job(text=(code / "data.txt").open(), raw=(code / "data.txt").open("rb"))
    job.out, job.memory = sys.stdout, memory
    with job.text, job.raw:
        job.text.readline()
        job.raw.read(2)
        image = context_switch.stage(job, step=1, around=Surroundings(code=code), accelerator=CPU)
    moved = code.rename(tmp_path / "elsewhere")
    back = context_switch.restore(image, around=Surroundings(code=moved), accelerator=CPU)
    with back.text, back.raw:
        assert back.text.readline() == "two\n"
        assert back.raw.read(2) == b"e\n"
    assert back.memory.read() == b"bc"
    assert back.out is sys.stdout


def test_what_belongs_to_the_process_is_found_again_there(tmp_path):
    here, there = Job(), Job()
    job = Job(ctx=here, log=here.__dict__)
    image = context_switch.stage(job, step=1, around=Surroundings(ctx=here), accelerator=CPU)
    back = context_switch.restore(image, around=Surroundings(ctx=there), accelerator=CPU)
    assert back.ctx is there


def test_inputs_leave_the_random_numbers_alone(tmp_path):
    image = context_switch.stage(torch.ones(2), step=0, around=Surroundings(), accelerator=CPU)
    torch.manual_seed(8)
    before = torch.get_rng_state()
    found = context_switch.value(image, around=Surroundings(), accelerator=CPU)
    assert torch.equal(found, torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


def _numbers() -> Any:
    return (i for i in range(3))


def _keeping(thing: Any) -> Any:
    return lambda: thing


def _loader() -> Any:
    return iter(torch.utils.data.DataLoader([1, 2, 3]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "path", "what"),
    [
        (lambda: Job(data=Job(_it=_numbers())), "job.data._it", "generator"),
        (lambda: Job(zipped=zip(iter([1]), _numbers(), strict=True)), "job.zipped", "generator"),
        (lambda: Job(locks=[1, {"a": threading.Lock()}]), "job.locks[1]['a']", "lock"),
        (lambda: Job(thread=threading.Thread()), "job.thread", "lock"),
        (lambda: Job(loader=_loader()), "job.loader", "_SingleProcessDataLoaderIter"),
        (lambda: Job(weak=weakref.ref(CPU)), "job.weak", "ReferenceType"),
        (lambda: Job(out=torch.nn.Linear(1, 1)(torch.ones(1))), "job.out", "live autograd"),
        (lambda: Job(call=_keeping(threading.Lock())), "job.call.<thing>", "lock"),
    ],
)
def test_what_cannot_be_captured_is_named_with_its_path(make, path, what):
    error = refused(make())
    assert error.path.startswith(path)
    assert what in error.what
    assert error.advice


def test_a_file_that_is_not_a_plain_one_is_refused(tmp_path):
    with gzip.open(tmp_path / "a.gz", "wb") as out:
        out.write(b"packed")
    with gzip.open(tmp_path / "a.gz") as packed:
        assert refused(Job(data=packed)).path.startswith("job.data")


def test_a_socket_is_refused():
    with socket.socket() as sock:
        assert refused(Job(net={"a": sock})).path == "job.net['a']"


def test_a_file_open_for_writing_is_refused(tmp_path):
    with (tmp_path / "out").open("w") as out:
        error = refused(Job(out=out))
    assert error.path == "job.out"
    assert "writing" in error.what


def test_a_gradient_hook_is_refused():
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda g: g)
    assert "hook" in refused(Job(p=parameter)).what


def test_memory_shared_in_part_with_an_array_is_refused():
    array = np.zeros(10)
    assert "share" in refused(Job(a=array, t=torch.from_numpy(array[5:]))).what


def test_a_cut_image_is_not_read(tmp_path):
    image = context_switch.stage(
        Job(a=torch.ones(100)), step=1, around=Surroundings(), accelerator=CPU
    )
    whole = b"".join(image.pieces())
    assert len(whole) == image.size_bytes
    for length in (0, 10, 60, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(checkpoint.Unreadable):
            checkpoint.load(tmp_path / "cut")
