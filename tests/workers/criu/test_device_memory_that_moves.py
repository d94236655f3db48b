"""Commands with device memory whose processes go with their images; the driver is played.

On a GPU the same is tried by the step `move` of `make gpu`.
"""

from __future__ import annotations

import hashlib
import os
import signal

import pytest

from app.core.model.protocol.messages import Finished, Paused, Saved, Started
from app.core.model.provisions.process_images import OFFER
from tests.workers.conftest import bundled
from tests.workers.criu import played_cuda
from tests.workers.criu.moving import skip_without_layers
from workers.device.processes import zygote_handle
from workers.process.isolation.device_access import DeviceAccess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may store processes")

#: Only its device memory knows how far it is.  It ends when the test lets it.
COUNTS = (
    played_cuda.PRELUDE
    + """
import hashlib, itertools
for n in itertools.count(1):
    with step():
        memory[:64] = hashlib.sha256(memory[:64] + b"%d" % n).hexdigest().encode()
    time.sleep(0.005)
    if n % 10 == 0:
        os.write(1, b"%d\\n" % n)  # in one piece, between whose parts it cannot be ended
        if os.path.exists("end"): break
with step():
    print("sum", memory[:64].decode(), flush=True)
"""
)


def counted(steps: int) -> list[str]:
    """Return what an undisturbed run of so many steps prints."""
    held = bytes(64)
    for n in range(1, steps + 1):
        held = hashlib.sha256(held + b"%d" % n).hexdigest().encode()
    return [*(str(n) for n in range(10, steps + 1, 10)), f"sum {held.decode()}"]


@pytest.fixture
def hosts(tmp_path, rigs, criu, fresh_zygotes, monkeypatch):
    """Makes device workers with one store, each with a GPU of its own and a played driver."""
    plays = f"from {played_cuda.__name__} import play; play(); from workers"
    begun = zygote_handle._BOOT.replace("from workers", plays)
    monkeypatch.setattr(zygote_handle, "_BOOT", begun)
    (tmp_path / "store").mkdir()
    made = []

    def make(**options):
        number, home = len(made), tmp_path / f"host{len(made)}"
        home.mkdir(mode=0o755)
        (home / "store").symlink_to(tmp_path / "store")
        id = f"GPU-{number:08x}-0000-0000-0000-000000000000"
        access = DeviceAccess(id=id, variables={"CUDA_VISIBLE_DEVICES": id})
        more = {
            "kind": "cuda",
            "access": access,
            "criu": str(criu),
            "can_checkpoint": True,
        } | options
        rig = rigs(home=home, device=f"h{number}.0", lease_s=60.0, **more)
        made.append(rig)
        skip_without_layers(rig)
        assert rig.until(lambda: OFFER in rig.reports[-1].facts["offers"])
        return rig

    return make


@pytest.fixture
def launched(hosts):
    def launch(rig, epoch=1, files=None, **more):
        bundle, _ = rig.store.put([bundled({"p.py": COUNTS, **(files or {})})])
        rig.launch("t1", ["python", "p.py"], epoch, bundle=bundle, **more)
        return rig.event(Started, "t1", epoch)

    return launch


def _calls(rig):
    (held,) = rig.supervisor.stays.residents.values()
    with open(f"/proc/{held.pid}/cwd/calls") as calls:
        return calls.read().split("\n")[:-1]


def _to_the_end(rig, epoch):
    rig.let_end("t1", epoch)
    rig.event(Finished, "t1", epoch)
    rig.until(lambda: rig.view("t1", epoch) is None)
    return rig.printed("t1", epoch)


def test_command_goes_on_with_its_device_memory_on_another_gpu(hosts, launched):
    here, there = hosts(), hosts()
    started = launched(here)
    assert "move" in started.capabilities
    here.until(lambda: here.printed("t1"))
    images = here.paused_and_saved("t1", 1)
    assert here.all(Saved, "t1")[-1].has_processes
    assert launched(there, 2, images=images).resumed == "image"
    there.until(lambda: there.printed("t1", 2))
    there.until(lambda: _calls(there)[-1] == "unlock")
    before, now = "00000000" * 4, played_cuda.HERE.hex()
    assert _calls(there) == ["lock", "checkpoint", f"restore {before} to {now}", "unlock"]
    printed = here.printed("t1") + _to_the_end(there, 2)
    assert printed == counted(int(printed[-2]))


def test_image_of_a_running_command_takes_its_device_memory_off_for_a_moment(hosts, launched):
    rig = hosts()
    launched(rig)
    rig.until(lambda: rig.printed("t1"))
    rig.save("t1")  # and not by time: no image is being made when it is killed
    assert rig.event(Saved, "t1").has_processes
    rig.until(lambda: _calls(rig)[:4] == ["lock", "checkpoint", "restore", "unlock"])
    (held,) = rig.supervisor.stays.residents.values()
    os.kill(held.pid, signal.SIGKILL)
    rig.until(lambda: rig.view("t1") is None)
    saved = rig.all(Saved, "t1")[-1]
    assert launched(rig, 2, images=[rig.image(saved)]).resumed == "image"
    ended = _to_the_end(rig, 2)
    assert ended == counted(int(ended[-2]))[-len(ended) :]


def test_command_begins_again_where_its_device_memory_cannot_come_back(hosts, launched):
    here, there = hosts(), hosts()
    launched(here, files={"refused": "restore"})
    here.until(lambda: here.printed("t1"))
    images = here.paused_and_saved("t1", 1)
    assert launched(there, 2, images=images).resumed == "image"
    told = "could not go on where it was: its device memory could not be restored: restore of"
    there.until(lambda: any(told in line for line in there.printed("t1", 2)))
    ours = [line for line in _to_the_end(there, 2) if not line.startswith("Roundhouse: ")]
    # The restored process may print once more before its device memory is refused.
    begun_again = ours[ours.index("10") :]
    assert begun_again == counted(int(begun_again[-2]))


def test_device_memory_that_cannot_leave_lets_the_command_run_and_is_told(hosts, launched):
    rig = hosts()
    launched(rig, files={"refused": "lock"}, checkpoint_every_s=0.2)
    saved = rig.until(lambda: [one for one in rig.all(Saved, "t1") if one.bound_because])[0]
    assert not saved.has_processes
    assert "did not leave the device" in saved.bound_because
    assert _to_the_end(rig, 1)[-1].startswith("sum")
    assert not rig.all(Paused, "t1")


def test_command_on_a_device_whose_driver_cannot_do_it_says_so(hosts, launched):
    started = launched(hosts(can_checkpoint=False))
    assert "move" not in started.capabilities
    assert (
        started.bound_because == "the driver of its cuda device cannot move memory off the device"
    )
