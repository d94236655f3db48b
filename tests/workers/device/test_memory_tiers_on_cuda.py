"""State leaves a CUDA device's memory and comes back, bit by bit; run by `make gpu`."""

from __future__ import annotations

import pytest
import torch

from workers.capture.capture import Surroundings, capture
from workers.hardware.accelerator import Accelerator
from workers.process import slab
from workers.process.slab import Slab
from workers.switching.offload import Absence, CalledOff
from workers.switching.staging import Staging

pytestmark = pytest.mark.gpu

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
    def __init__(self, cuda: Accelerator) -> None:
        held = Slab(slab.made(512 * MB))
        self.cuda, self.staging = cuda, Staging(held, None)
        self.absence = Absence(held, cuda, self.staging.pinned)

    def leave(self, job: Job) -> None:
        self.cuda.synchronize()
        captured = capture(job, around=Surroundings(), accelerator=self.cuda)
        _, lying = self.staging.bring(captured)
        self.absence.leave(lying, lambda: None)


@pytest.fixture
def cuda() -> Accelerator:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return Accelerator("cuda")


def test_a_job_trains_on_as_if_it_had_never_left(cuda):
    results = []
    for leaves in (False, True):
        torch.manual_seed(0)
        job, place = Job(cuda.device), Place(cuda)
        for _ in range(6):
            job.step()
            if leaves:
                place.leave(job)
                place.absence.come_back(lambda size: None)
        assert job.view.data_ptr() == job.net[0].weight[3:5].data_ptr()
        results.append(job.state())
    assert all(map(torch.equal, *results))


def test_its_memory_is_the_devices_again(cuda):
    job, place = Job(cuda.device), Place(cuda)
    job.step()
    state, before = job.state(), cuda.held_bytes()
    place.leave(job)
    gone = place.absence.bytes
    assert gone >= 8 * 4 * 1024 * 1024 * 4  # weights, gradients, two averages
    assert before - cuda.held_bytes() >= 0.8 * gone
    assert job.on_host.untyped_storage().nbytes() == job.on_host.nbytes
    place.absence.come_back(lambda size: None)
    assert all(map(torch.equal, job.state(), state))


def test_coming_back_may_be_called_off(cuda):
    job, place = Job(cuda.device), Place(cuda)
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
