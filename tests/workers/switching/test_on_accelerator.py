"""Images of jobs on an accelerator, whose memory is not the host's and whose work runs late."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from examples.gang_alone import state_hash
from tests.sim import orders
from workers.capture.capture import Surroundings, Uncapturable, capture
from workers.hardware.accelerator import Accelerator, default_generators
from workers.process import slab
from workers.process.image_layout import Layout
from workers.process.slab import Slab
from workers.ranks.swap import RankOffload
from workers.residents import entry
from workers.switching import context_switch
from workers.switching.offload import Absence
from workers.switching.staging import Staging

pytestmark = pytest.mark.sim

MB = 2**20


@pytest.fixture(params=orders.several(2))
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """Run the test in every order in which the device may do its work."""
    accelerator = Accelerator("sim")
    orders.choose(request.param)
    yield accelerator
    orders.choose()
    gc.collect()
    torch.sim.empty_cache()


class Job:
    def __init__(self, device: torch.device) -> None:
        self.net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)]).to(device)
        self.opt = torch.optim.AdamW(self.net.parameters())
        self.noise = torch.Generator(device=device).manual_seed(3)

    def step(self) -> None:
        self.opt.zero_grad()
        given = torch.randn(4, 256, device=self.noise.device, generator=self.noise)
        self.net(given).square().mean().backward()
        self.opt.step()

    def state(self) -> list[torch.Tensor]:
        return [part.detach().cpu().clone() for part in self.net.parameters()]


class Place:
    """A job's slab, with what leaves to it and comes back."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.slab = accelerator, Slab(slab.made(64 * MB))
        self.staging = Staging(self.slab, None, accelerator)
        self.absence = Absence(self.slab, accelerator, self.staging.pinned)

    def stage(self, job: Job) -> Layout:
        """Make an image while the job goes on; return its layout once it is complete."""
        done, found = threading.Event(), []
        self.accelerator.synchronize()
        captured = capture(job, around=Surroundings(), accelerator=self.accelerator)
        self.staging.begin(captured, lambda layout: (found.append(layout), done.set()))
        job.step()
        assert done.wait(30)
        self.staging.join()
        return found[0]

    def restored(self, layout: Layout) -> Job:
        return context_switch.restored(
            self.slab, layout.as_json(), around=Surroundings(), accelerator=self.accelerator
        )

    def leave(self, job: Job) -> None:
        self.accelerator.synchronize()
        captured = capture(job, around=Surroundings(), accelerator=self.accelerator)
        _, lying = self.staging.bring(captured)
        self.absence.leave(lying, lambda: None)


def _job(accelerator: Accelerator) -> Job:
    entry.seed(accelerator)
    job = Job(accelerator.device)
    for _ in range(2):
        job.step()
    return job


def test_image_of_a_job_that_goes_on_holds_its_safe_point(accelerator: Accelerator) -> None:
    job, place = _job(accelerator), Place(accelerator)
    before = job.state()
    layout = place.stage(job)
    back = place.restored(layout)
    assert all(map(torch.equal, back.state(), before))
    assert not torch.equal(job.state()[0], before[0])
    back.step()
    assert all(map(torch.equal, back.state(), job.state()))


@pytest.mark.parametrize("lack", ["is told", "shows when the copy is made"])
def test_image_without_room_on_the_device_waits_until_it_has_left(
    accelerator: Accelerator, lack: str
) -> None:
    job, place = _job(accelerator), Place(accelerator)
    before = job.state()
    free = 0 if lack == "is told" else 2**40
    with mock.patch.object(accelerator, "free_bytes", return_value=free):
        if lack == "is told":
            layout = place.stage(job)
        else:
            held = torch.sim.memory_reserved() / torch.accelerator.get_memory_info()[1]
            torch.sim.empty_cache()
            torch.sim.set_per_process_memory_fraction(held / 2)
            try:
                captured = capture(job, around=Surroundings(), accelerator=accelerator)
                layout = place.staging.begin(captured, lambda layout: None)
                place.staging.join()
            finally:
                torch.sim.set_per_process_memory_fraction(1.0)
    assert all(map(torch.equal, place.restored(layout).state(), before))


def test_job_that_leaves_and_comes_back_trains_on_with_the_same_bits(
    accelerator: Accelerator,
) -> None:
    job, twin, place = _job(accelerator), _job(accelerator), Place(accelerator)
    junk = [torch.full((256, 256), 5.0, device="sim") for _ in range(9)]
    for _ in range(4):
        place.leave(job)
        assert place.absence.bytes >= 3 * 256 * 256 * 4
        junk = [part + 1 for part in junk]  # takes the freed blocks, and frees others
        place.absence.come_back(lambda size: None)
        job.step()
        twin.step()
    assert all(map(torch.equal, job.state(), twin.state()))
    assert len(junk) == 9


def test_staged_value_is_restored_on_the_device(accelerator: Accelerator) -> None:
    job = _job(accelerator)
    image = context_switch.stage(job, step=2, around=Surroundings(), accelerator=accelerator)
    back = context_switch.restore(image, around=Surroundings(), accelerator=accelerator)
    assert back.net[0].weight.device == accelerator.device
    assert all(map(torch.equal, back.state(), job.state()))
    job.step()
    back.step()
    assert torch.equal(back.noise.get_state(), job.noise.get_state())


def test_job_of_another_kind_of_device_is_refused_by_name(accelerator: Accelerator) -> None:
    image = context_switch.stage(
        _job(accelerator), step=2, around=Surroundings(), accelerator=accelerator
    )
    with pytest.raises(context_switch.WrongKind, match="lay on sim; this device worker serves cpu"):
        context_switch.restore(image, around=Surroundings(), accelerator=Accelerator("cpu"))


def test_seed_reaches_the_devices_generator() -> None:
    accelerator = Accelerator("sim")
    entry.seed(accelerator)
    first = torch.randn(4, device="sim")
    entry.seed(accelerator)
    assert torch.equal(first, torch.randn(4, device="sim"))


def test_streams_events_and_generators_are_made_anew(accelerator: Accelerator) -> None:
    handles = {
        "side": torch.Stream("sim"),
        "default": torch.sim.current_stream(),
        "event": torch.Event("sim"),
        "noise": torch.sim.default_generators[0],
    }
    image = context_switch.stage(handles, step=0, around=Surroundings(), accelerator=accelerator)
    back = context_switch.restore(image, around=Surroundings(), accelerator=accelerator)
    assert back["side"].stream_id != 0
    assert back["default"] == torch.sim.current_stream()
    assert back["event"].query()
    assert back["noise"] is default_generators()["torch.sim.default_generators.0"]


def test_same_address_on_host_and_device_is_no_common_memory() -> None:
    on_device, on_host = torch.ones(64, device="sim"), torch.zeros(64)
    where = type(on_host.untyped_storage())
    with mock.patch.object(where, "data_ptr", return_value=4096):
        captured = capture(
            [on_device, on_host],
            around=Surroundings(),
            accelerator=Accelerator("sim"),
            whole=False,
        )
    assert [one.device.type for one in captured.storages] == ["sim", "cpu"]


def test_rank_that_gives_its_slot_away_leaves_the_device(accelerator: Accelerator) -> None:
    job = _job(accelerator)
    before = job.state()
    offload = RankOffload(accelerator)
    offload.leave([])
    assert offload.last_bytes >= 3 * 3 * 256 * 256 * 4  # with the optimizer's state
    assert job.net[0].weight.untyped_storage().nbytes() == 0
    offload.enter()
    assert all(map(torch.equal, job.state(), before))


def test_offload_by_a_job_with_a_default_device_takes_host_memory(
    accelerator: Accelerator,
) -> None:
    job = _job(accelerator)
    with accelerator.device:
        offload = RankOffload(accelerator)
        offload.leave([])
        assert offload.slab.device.type == "cpu"
        assert offload.out_bytes > 0
        offload.enter()
    assert job.net[0].weight.untyped_storage().nbytes() == 256 * 256 * 4


def test_state_that_comes_back_on_a_side_stream_is_of_the_default_one() -> None:
    """As for a rank that slept in a collective which FSDP issued on a stream of its own."""
    size = 64 * 1024
    state, side = torch.full((size,), 3.0, device="sim"), torch.Stream("sim")
    offload = RankOffload(Accelerator("sim"))
    offload.note([state])
    offload.leave([])
    with side:
        offload.enter()
    later = state + 1  # still in the default stream's queue when the state is freed
    del state
    with side:
        other = torch.full((size,), 9.0, device="sim")
    side.synchronize()
    assert (later[0].item(), later[-1].item()) == (4.0, 4.0)
    assert other[0].item() == 9.0


def test_segment_with_a_small_block_that_stays_is_held_after_all_else_has_left() -> None:
    """An allocator gives back whole segments: held bytes shrink by less than left the device."""
    accelerator = Accelerator("sim")
    gc.collect()
    torch.sim.empty_cache()
    before = accelerator.held_bytes()
    others = []  # fill what other tests left, so that the small block opens a segment
    while accelerator.held_bytes() == before:
        others.append(torch.ones(64, device="sim"))
    del others[-1]
    accelerator.synchronize()
    torch.sim.empty_cache()
    assert accelerator.held_bytes() == before
    large = [torch.ones(2 * MB // 4, device="sim") for _ in range(5)]
    small = torch.ones(64, device="sim")  # below what is worth moving
    pinned = [torch.ones(128 * 1024, device="sim") for _ in range(2)]  # in the small one's segment
    offload = RankOffload(accelerator)
    offload.note([*large, small, *pinned])
    offload.leave([])
    held = accelerator.held_bytes() - before
    assert held == 2 * MB
    assert small.sum().item() == 64
    offload.enter()
    assert accelerator.held_bytes() - before > 10 * MB


def test_hash_of_a_state_on_the_device_is_that_of_its_bytes(accelerator: Accelerator) -> None:
    job = _job(accelerator)
    twin = Job(accelerator.device)
    twin.net.load_state_dict(job.net.state_dict())
    twin.opt = job.opt
    assert state_hash(job) == state_hash(twin)


def test_kind_that_torch_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="serves h100, and torch knows no such kind"):
        Accelerator("h100")


def test_open_lock_of_a_job_on_the_device_is_refused_with_its_place() -> None:
    lock = threading.Lock()
    with lock, pytest.raises(Uncapturable, match="a lock that is held"):
        capture([lock], around=Surroundings(), accelerator=Accelerator("sim"))
