"""An image that is told of is the state at its safe point, whatever the job does meanwhile."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.workers.watching import WATCH, needs_watch
from workers.capture.capture import Surroundings, capture
from workers.hardware.accelerator import Accelerator
from workers.hardware.dirty_pages import Watch
from workers.process import slab
from workers.process.image_layout import Layout
from workers.process.slab import Slab
from workers.switching import context_switch, staging
from workers.switching.staging import WATCHED_BYTES, ImageTooLarge, Staging

KINDS = ["cpu", pytest.param("sim", marks=pytest.mark.sim)]
WIDE = 256  # a weight of WIDE x WIDE floats is large enough to be watched
LIMIT = 64 << 20


class Job:
    """Has everything that is treated differently: weights, state, buffers, a frozen part."""

    def __init__(self, make: Any = torch.optim.AdamW, kind: str = "cpu") -> None:
        self.base = torch.nn.Linear(WIDE, WIDE).requires_grad_(False).to(kind)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDE, WIDE), torch.nn.BatchNorm1d(WIDE), torch.nn.Linear(WIDE, WIDE)
        ).to(kind)
        self.opt = make(self.net.parameters(), lr=1e-3)
        self.history = torch.zeros(WIDE * WIDE, device=kind)

    def forward(self) -> None:
        out = self.net(self.base(torch.randn(8, WIDE, device=self.history.device)))
        out.square().mean().backward()

    def step(self) -> None:
        self.opt.zero_grad()
        self.forward()
        self.opt.step()

    def state(self) -> list[torch.Tensor]:
        parts = [*self.net.state_dict().values(), *self.base.state_dict().values(), self.history]
        for values in self.opt.state.values():
            parts += [value for value in values.values() if isinstance(value, torch.Tensor)]
        parts += [p.grad for p in self.net.parameters() if p.grad is not None]
        return [torch.get_rng_state(), *(part.detach().clone() for part in parts)]


class Stage:
    """Stages a job, and says what its image holds."""

    def __init__(self, watch: Watch | None = WATCH, limit: int = LIMIT, kind: str = "cpu") -> None:
        self.slab, self.accelerator = Slab(slab.made(limit)), Accelerator(kind)
        self.staging = Staging(self.slab, watch, self.accelerator)
        self.told: queue.SimpleQueue[Layout] = queue.SimpleQueue()
        self.images = 0

    def begin(self, job: Job) -> list[torch.Tensor]:
        """Returns the state that the image must hold."""
        expected = job.state()
        captured = capture(job, around=Surroundings(), accelerator=self.accelerator)
        self.staging.begin(captured, self.told.put)
        return expected

    @contextlib.contextmanager
    def held_up(self, job: Job) -> Iterator[None]:
        """An image of the next safe point; none of it is copied before the end of the block."""
        free = threading.Event()
        captured = capture(job, around=Surroundings(), accelerator=self.accelerator)
        self.staging.begin(captured, lambda _: free.wait(timeout=60))  # keeps the thread busy
        job.step()
        self.begin(job)
        yield
        free.set()

    def image(self) -> list[torch.Tensor]:
        """The state of the job in the newest image; the random numbers of this process stay."""
        self.staging.join()
        kept, of_device = torch.get_rng_state(), self.accelerator.random_state()
        layout = self.told.get(timeout=60).as_json()
        assert self.told.empty()
        self.images += 1
        how = {"around": Surroundings(), "accelerator": self.accelerator}
        job = context_switch.restored(self.slab, layout, **how)
        state: list[torch.Tensor] = job.state()
        torch.set_rng_state(kept)
        self.accelerator.set_random_state(of_device)
        return state


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Byte by byte: there may be NaN where nothing was ever written."""
    return [bits(part) for part in one] == [bits(part) for part in other]


def bits(tensor: torch.Tensor) -> tuple[Any, bytes]:
    return tensor.shape, tensor.cpu().contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda parts, lr: torch.optim.AdamW(parts, lr, fused=True),
        lambda parts, lr: torch.optim.AdamW(parts, lr, foreach=True),
        lambda parts, lr: torch.optim.SGD(parts, lr, momentum=0.9),
        torch.optim.Adagrad,
    ],
)
@pytest.mark.parametrize(
    ("kind", "watch"),
    [
        pytest.param("cpu", WATCH, marks=needs_watch),
        ("cpu", None),
        pytest.param("sim", None, marks=pytest.mark.sim),
    ],
)
def test_next_steps_do_not_change_an_image(make, kind, watch):
    job, stage = Job(make, kind), Stage(watch, kind=kind)
    for _ in range(5):
        job.step()
        expected = stage.begin(job)
        job.step()
        assert not stage.staging.spoiled
        assert same(stage.image(), expected)
    assert stage.images == 5


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_that_steps_at_once_waits(kind):
    job, stage = Job(kind=kind), Stage(kind=kind)
    job.step()
    for _ in range(10):
        expected = stage.begin(job)
        job.opt.step()
        assert same(stage.image(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_accumulated_over_steps_are_kept(kind):
    job, stage = Job(kind=kind), Stage(kind=kind)
    job.step()
    for _ in range(6):
        expected = stage.begin(job)
        job.forward()
        stage.staging.join()
        if not stage.staging.spoiled:
            assert same(stage.image(), expected)
    # Two gradients are large: of each it learns once that it is written to, sooner or later.
    assert stage.images >= 6 - 2


@needs_watch
@pytest.mark.parametrize(
    "write",
    [
        lambda job: job.net[0].weight.data.clamp_(-0.01, 0.01),
        lambda job: job.net[2].weight.detach().numpy().__setitem__((100, 0), 7.0),
        lambda job: job.opt.state[job.net[0].weight]["exp_avg"].view(-1)[5000].fill_(3),
        lambda job: torch._foreach_mul_([job.net[0].weight.detach()], 0.5),
    ],
)
def test_write_outside_an_optimizer_spoils_one_image_and_no_other(write):
    job, stage = Job(), Stage()
    for _ in range(2):
        job.step()
    with stage.held_up(job):
        write(job)
    stage.staging.join()
    assert stage.staging.spoiled
    for _ in range(3):
        expected = stage.begin(job)
        write(job)
        job.step()
        assert not stage.staging.spoiled
        assert same(stage.image(), expected)
    assert stage.images == 3


@needs_watch
def test_unchanged_storage_is_not_copied_again():
    job, stage = Job(), Stage()
    frozen = job.base.weight.nbytes + job.history.nbytes
    copied = []
    for _ in range(4):
        job.step()
        expected = stage.begin(job)
        assert same(stage.image(), expected)
        copied.append(stage.staging.copied_bytes)
    assert copied[1] - copied[2] == pytest.approx(frozen, abs=WATCHED_BYTES)
    job.step()
    job.history[5000] = 1.0
    expected = stage.begin(job)
    assert same(stage.image(), expected)
    assert stage.staging.copied_bytes - copied[3] == pytest.approx(frozen / 2, abs=WATCHED_BYTES)


@needs_watch
def test_parameters_of_a_late_optimizer_do_not_stay_hot():
    job, stage = Job(), Stage()
    for _ in range(3):  # nobody has stepped yet
        stage.begin(job)
        stage.told.get(timeout=60)
    for _ in range(3):
        job.step()
        expected = stage.begin(job)
        assert not any(known.is_hot for known in stage.staging._known.values())
        assert same(stage.image(), expected)


def _full(job: Job, dice: random.Random) -> torch.Tensor:
    size, device = dice.choice((10, 70_000)), job.history.device
    return torch.full((size,), dice.random(), device=device)


@needs_watch
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_image_is_never_wrong_whatever_a_job_does(seed, kind):
    dice = random.Random(seed)
    job, stage = Job(kind=kind), Stage(kind=kind)
    deeds = [
        job.step,
        job.forward,
        job.opt.step,
        lambda: job.opt.zero_grad(set_to_none=False),
        lambda: job.net[0].weight.data.clamp_(-1, 1),
        lambda: job.history.add_(1),
        lambda: job.base.weight.data.view(-1)[dice.randrange(WIDE)].fill_(dice.random()),
        lambda: setattr(job, "history", _full(job, dice)),
        lambda: job.history.resize_(dice.choice((20_000, 90_000))),
        lambda: job.opt.load_state_dict(job.opt.state_dict()),
    ]
    for _ in range(40):
        expected = stage.begin(job)
        for _ in range(dice.randrange(4)):
            dice.choice(deeds)()
        stage.staging.join()
        if not stage.staging.spoiled:
            assert same(stage.image(), expected)
    assert stage.images > 20


def test_child_process_that_trains_waits_for_nothing():
    job, stage = Job(), Stage()
    job.step()
    expected = stage.begin(job)
    if not (child := os.fork()):
        for parameter in job.net.parameters():
            parameter.grad = None
        job.opt.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert same(stage.image(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_does_not_fit_is_refused_before_anything_is_copied(kind):
    job, stage = Job(kind=kind), Stage(limit=1 << 20, kind=kind)
    with pytest.raises(ImageTooLarge, match="can keep at most 1048576"):
        stage.begin(job)
    assert slab.held_bytes(stage.slab.fd) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_storages_keep_their_places_while_the_object_graph_grows(kind):
    job, stage = Job(kind=kind), Stage(kind=kind)
    places = []
    for n in range(3):
        job.text = "x" * 10_000 * n  # type: ignore[attr-defined]
        stage.begin(job)
        places.append(stage.told.get(timeout=60).storages)
    assert places[0] == places[1] == places[2]
    assert places[0][0].offset >= staging._GRAPH_ROOM
