"""Off the device and back: an image holds what the job was, and the job goes on meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from workers.capture.capture import Surroundings
from workers.hardware.accelerator import Accelerator
from workers.switching import context_switch
from workers.switching import image_file as images

CPU = Accelerator("cpu")
each_kind = pytest.mark.parametrize("kind", ["cpu", pytest.param("sim", marks=pytest.mark.sim)])


class Job:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


@each_kind
def test_job_is_restored_from_a_file(tmp_path, kind):
    accelerator = Accelerator(kind)
    job = Job(weight=torch.arange(3.0, device=kind))
    job.tail = job.weight[1:]
    image = context_switch.stage(job, step=3, around=Surroundings(), accelerator=accelerator)
    images.save(image, tmp_path / "image")
    loaded = images.load(tmp_path / "image")
    assert loaded.step == 3
    assert loaded.fingerprint == image.fingerprint
    back = context_switch.restore(loaded, around=Surroundings(), accelerator=accelerator)
    assert back.weight.device == accelerator.device
    back.tail[0] = 7
    assert back.weight.tolist() == [0.0, 7.0, 2.0]


@each_kind
def test_image_does_not_change_when_the_job_goes_on(tmp_path, kind):
    accelerator = Accelerator(kind)
    job = Job(weight=torch.zeros(3, device=kind), array=np.zeros(3))
    image = context_switch.stage(job, step=1, around=Surroundings(), accelerator=accelerator)
    job.weight += 1
    job.array += 1
    back = context_switch.restore(image, around=Surroundings(), accelerator=accelerator)
    assert back.weight.sum() == back.array.sum() == 0


@each_kind
def test_reading_inputs_leaves_random_numbers_unchanged(tmp_path, kind):
    accelerator, given = Accelerator(kind), torch.ones(2, device=kind)
    how = {"around": Surroundings(), "accelerator": accelerator}
    image = context_switch.stage(given, step=0, **how)
    torch.manual_seed(8)
    before = [torch.get_rng_state(), *accelerator.random_state()]
    assert torch.equal(context_switch.value(image, **how), given)
    assert all(map(torch.equal, [torch.get_rng_state(), *accelerator.random_state()], before))


@each_kind
def test_truncated_image_is_not_read(tmp_path, kind):
    job, how = Job(a=torch.ones(100, device=kind)), {"accelerator": Accelerator(kind)}
    image = context_switch.stage(job, step=1, around=Surroundings(), **how)
    whole = b"".join(image.pieces())
    assert len(whole) == image.size_bytes
    for length in (0, 10, 60, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(images.Unreadable):
            images.load(tmp_path / "cut")


def test_value_is_mapped_from_its_file_and_writes_do_not_reach_it(tmp_path):
    given = {"a": torch.arange(1000.0), "b": torch.arange(7.0), "none": torch.ones(0)}
    image = context_switch.stage(given, step=0, around=Surroundings(), accelerator=CPU)
    images.save(image, tmp_path / "image")
    before = (tmp_path / "image").read_bytes()
    how = {"around": Surroundings(), "accelerator": CPU, "mapped": True}
    found = context_switch.value(images.load(tmp_path / "image"), **how)
    assert not found["a"].untyped_storage().resizable()  # it is not torch's own memory
    assert all(tensor.data_ptr() % images.ALIGN_BYTES == 0 for tensor in found.values())
    found["a"] += 1
    assert (tmp_path / "image").read_bytes() == before
    (tmp_path / "image").unlink()
    assert torch.equal(found["a"], given["a"] + 1)
    assert torch.equal(found["b"], given["b"])


def test_memory_of_a_job_that_left_is_used_again():
    spare, size = context_switch.Spare(), 1 << 20
    first = spare.take(size)
    assert spare.take(size).data_ptr() != first.data_ptr()  # that one has not left
    spare.give_back([first])
    assert spare.take(2 * size).data_ptr() != first.data_ptr()
    assert spare.take(size).data_ptr() == first.data_ptr()
    spare.give_back([spare.take(context_switch.SPARE_BYTES), first])
    assert spare.take(size).data_ptr() == first.data_ptr()  # the newest stay
    spare.give_back([first])
    spare.let_go()
    assert spare._free == []
