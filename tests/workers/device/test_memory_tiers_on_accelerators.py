"""State leaves an accelerator's memory and comes back, bit by bit; `make gpu` runs it on CUDA."""

from __future__ import annotations

import pytest
import torch

from workers.capture.capture import Surroundings, capture
from workers.hardware.accelerator import Accelerator
from workers.process import slab
from workers.process.slab import Slab
from workers.switching.offload import Absence, CalledOff
from workers.switching.staging import Staging

MB = 2**20


class Job:
    def __init__(self, device: torch.device) -> None:
        self.net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).to(device)
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.view = self.net[0].weight.detach()[3:5]
        self.on_host = torch.ones(1 << 20)

    def step(self) -> None:
        self.opt.zero_grad()
        self.net(torch.randn(4, 1024, device=self.view.device)).square().mean().backward()
        self.opt.step()

    def state(self) -> list[torch.Tensor]:
        return [part.detach().cpu().clone() for part in self.net.parameters()]


class Place:
    def __init__(self, accelerator: Accelerator) -> None:
        held = Slab(slab.made(512 * MB))
        self.accelerator, self.staging = accelerator, Staging(held, None, accelerator)
        self.absence = Absence(held, accelerator, self.staging.pinned)

    def leave(self, job: Job) -> None:
        self.accelerator.synchronize()
        captured = capture(job, around=Surroundings(), accelerator=self.accelerator)
        _, lying = self.staging.bring(captured)
        self.absence.leave(lying, lambda: None)


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("sim", marks=pytest.mark.sim)]
)
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return Accelerator(request.param)


def test_job_trains_on_as_if_it_had_never_left(accelerator):
    results = []
    for leaves in (False, True):
        torch.manual_seed(0)
        job, place = Job(accelerator.device), Place(accelerator)
        for _ in range(6):
            job.step()
            if leaves:
                place.leave(job)
                place.absence.come_back(lambda size: None)
        assert job.view.data_ptr() == job.net[0].weight[3:5].data_ptr()
        results.append(job.state())
    assert all(map(torch.equal, *results))


def test_memory_of_a_job_that_left_is_free_on_the_device(accelerator):
    job, place = Job(accelerator.device), Place(accelerator)
    job.step()
    state, before = job.state(), accelerator.held_bytes()
    place.leave(job)
    gone = place.absence.bytes
    assert gone >= 8 * 4 * 1024 * 1024 * 4  # weights, gradients, two averages
    assert before - accelerator.held_bytes() >= 0.8 * gone
    assert job.on_host.untyped_storage().nbytes() == job.on_host.nbytes
    place.absence.come_back(lambda size: None)
    assert all(map(torch.equal, job.state(), state))


def test_return_to_the_device_may_be_cancelled(accelerator):
    job, place = Job(accelerator.device), Place(accelerator)
    job.step()
    state, left = job.state(), [10]
    place.leave(job)

    def room(size: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise CalledOff

    assert len(place.absence.come_back(room)) == 10
    place.absence.come_back(lambda size: None)
    assert all(map(torch.equal, job.state(), state))
