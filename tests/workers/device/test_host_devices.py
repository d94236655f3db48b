"""A worker that serves several devices of its host: what happens to one stays there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import Alive, Cancel, Finished, decode, encode
from app.core.model.protocol.wellformed import BadMessage
from app.messaging.message_keys import MessageKeys
from app.messaging.signed_messages import Mail, sealed_host_news, sealed_news
from app.settings import Settings
from app.storage.signing import BadSignature, Signer
from tests.security.bundle.attacks import frame
from tests.security.devices import attack, longest_silence_s
from tests.workers.conftest import PATIENCE_S, DeviceRig
from workers.device.host_devices import HostDevice, HostDevices, ServedDevice
from workers.device.processes import resident as residents
from workers.device.stays.spawning import LOCK_WAIT_S
from workers.device.supervisor import Supervisor
from workers.transfer.host_context import CannotServe, House, locked, next_incarnation

SILENCE_S = 10.0  # a lease: a device that is silent for longer is lost
FRAME = frame({"is": "still", "step": 1})


class KeptRig(DeviceRig):
    """A device whose supervisor is made anew, perhaps several one after the other."""

    service: ServedDevice
    finds = 0
    fault: Exception | None = None

    def begin(self) -> None:
        """Make no supervisor: the worker makes and starts them."""
        self.failures: list[Alive] = []  # reports that say why the device is not served

    @property
    def supervisor(self) -> Supervisor:
        until_s = time.monotonic() + PATIENCE_S
        while (served := self.service._served) is None:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        return served

    def send(self, alive: Alive) -> None:
        if alive.facts.get("failed"):
            self.failures.append(decode(encode(alive)))
        else:
            super().send(alive)

    def find(self) -> House:
        self.finds += 1
        if self.fault is not None:
            raise self.fault
        if self.finds > 1:
            self.house = replace(self.house, incarnation=next_incarnation(self.house.run / "of"))
        return self.house

    def describe(self) -> House:
        return replace(self.house, incarnation=next_incarnation(self.house.run / "of"))

    def device(self, find: Callable[[], House]) -> HostDevice:
        id = self.house.device
        return HostDevice(id=id, find=find, describe=self.describe, transport=self)


class Host:
    """A host of devices h.0, h.1, ... whose worker takes note of its end."""

    def __init__(self, home: Path, count: int, **house: Any) -> None:
        self.ended = threading.Event()
        self.rigs = [KeptRig(home, device=f"h.{n}", **house) for n in range(count)]
        devices = [rig.device(rig.find) for rig in self.rigs]
        self.island = MessageKeys(Signer.at(home / "island.key"))
        mail = Mail(MessageKeys(Signer.at(home / "host.key")), self.island.public)
        self.served = HostDevices(devices, mail, end_process=self.ended.set)
        for rig in self.rigs:
            rig.service = self.served.services[rig.house.device]

    def until(self, true: Callable[[], object]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def incarnations(self, n: int) -> set[str]:
        return {report.incarnation for report in self.rigs[n].reports}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(count: int, **house: Any) -> Host:
        made.append(Host(tmp_path, count, **house))
        return made[-1]

    yield make
    for host in made:
        for rig in host.rigs:
            rig.drop_all()
        host.served.stop()


def break_once(supervisor: Supervisor) -> None:
    """Let the next look at the residents' deadlines raise an error."""

    def broken() -> None:
        raise RuntimeError("a planted fault")

    supervisor.receive(broken)


@pytest.mark.slow
class TestFaultOfOneDevice:
    def test_device_is_served_again_and_the_other_loses_no_step(self, hosts):
        host = hosts(2)
        host.served.start()
        first, other = host.rigs
        other.launch("t2", "jobs:Count", params={"steps": 400, "nap_s": 0.01})
        other.until(lambda: other.view("t2") is not None and other.view("t2").step > 5)
        broken = first.supervisor
        break_once(broken)
        host.until(lambda: first.supervisor is not broken)
        assert [one.facts["failed"] for one in first.failures] == ["RuntimeError: a planted fault."]
        assert broken.has_left
        first.launch("t1", "jobs:Count", params={"steps": 3})
        first.until(lambda: first.all(Finished, "t1"))
        other.until(lambda: other.all(Finished, "t2"))
        assert not host.ended.is_set()
        assert len(host.incarnations(0)) == 2
        assert len(host.incarnations(1)) == 1

    def test_device_that_cannot_be_found_leaves_the_other_alone(self, hosts):
        host = hosts(2)
        gone, other = host.rigs
        gone.fault = CannotServe("the GPU fell off the bus")
        host.served.start()
        other.launch("t2", "jobs:Count", params={"steps": 3})
        other.until(lambda: other.all(Finished, "t2"))
        host.until(lambda: gone.finds >= 2)  # it is tried again
        assert gone.failures[0].facts["failed"] == "the GPU fell off the bus."
        assert gone.failures[0].residents == []
        gone.fault = None
        gone.launch("t1", "jobs:Count", params={"steps": 3})
        gone.until(lambda: gone.all(Finished, "t1"))
        assert not host.ended.is_set()

    def test_error_of_any_class_is_a_fault_of_its_device_alone(self, hosts):
        host = hosts(2)
        host.rigs[0].fault = OSError("no space left on device")
        host.served.start()
        other = host.rigs[1]
        other.launch("t2", "jobs:Count", params={"steps": 3})
        other.until(lambda: other.all(Finished, "t2"))
        assert not host.ended.is_set()

    def test_hang_ends_the_process(self, hosts):
        host = hosts(2)
        host.served.start()
        hung = host.rigs[0]
        hung.lease_s = 1.0
        hung.until(lambda: hung.supervisor.watchdog.limit_s == 1.0)
        free = threading.Event()
        hung.supervisor.receive(free.wait)
        host.until(host.ended.is_set)
        free.set()


class TestNoDevice:
    def test_worker_of_which_no_device_can_be_served_ends(self, hosts):
        host = hosts(2)
        for rig in host.rigs:
            rig.fault = CannotServe("there is no driver")
        host.served.start()
        host.until(host.ended.is_set)

    def test_worker_goes_on_while_one_device_is_still_being_tried(self, hosts):
        host, free = hosts(2), threading.Event()
        first, other = host.rigs
        first.fault = CannotServe("there is no driver")
        find = other.find

        def slow() -> House:
            free.wait()
            other.fault = CannotServe("there is no driver here, too")
            return find()

        host.served.services["h.1"].device = other.device(slow)
        host.served.start()
        host.until(lambda: first.finds >= 2)
        assert not host.ended.is_set()
        free.set()
        host.until(host.ended.is_set)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("others", [2, pytest.param(7, marks=pytest.mark.long)])
def test_flood_of_one_device_delays_no_report_of_another(hosts, others, monkeypatch):
    """Each resident may send 500 frames a second; here one may send what 32 of them may."""
    monkeypatch.setattr(residents, "FRAMES_PER_S", 16_000.0)
    monkeypatch.setattr(residents, "BYTES_PER_S", float(2**30))
    host = hosts(1 + others)
    host.served.start()
    first, *quiet = host.rigs
    attack(first, "flood", "flood_with_short_frames")
    first.until(lambda: first.printed("flood"))
    (flooding,) = first.supervisor.stays.residents.values()
    began_s, before, since = time.monotonic(), flooding.wire.read_bytes, []
    for rig in quiet:
        since.append(len(rig.reports))
        rig.launch(f"t{rig.house.device}", "jobs:Count", params={"steps": 500, "nap_s": 0.01})
    for rig in quiet:
        rig.until(lambda rig=rig: rig.all(Finished, f"t{rig.house.device}"))
    frames = (flooding.wire.read_bytes - before) / len(FRAME)
    assert frames / (time.monotonic() - began_s) > 1_000  # it does flood
    for rig, count in zip(quiet, since, strict=True):
        assert longest_silence_s(rig, count) < SILENCE_S
        assert rig.all(Finished, f"t{rig.house.device}")[0].step == 500
    assert all(len(host.incarnations(n)) == 1 for n in range(1 + others))


def test_stop_lets_all_devices_leave_at_the_same_time(hosts):
    host = hosts(2, drain_s=PATIENCE_S)  # a busy machine may need longer than a worker usually has
    host.served.start()
    for rig in host.rigs:
        rig.launch(f"t{rig.house.device}", "jobs:Count", params={"steps": 10_000, "nap_s": 0.01})
        rig.until(lambda rig=rig: rig.view(f"t{rig.house.device}") is not None)
    supervisors = [rig.supervisor for rig in host.rigs]
    host.served.stop()
    assert all(supervisor.has_left and not supervisor.failure for supervisor in supervisors)
    # The residents' processes hold the lock until the kernel has ended them, which a next worker
    # waits for.
    for rig in host.rigs:
        locked(rig.house.run / f"{rig.house.device}.lock", LOCK_WAIT_S)


class TestNews:
    def test_news_go_to_each_device_that_is_served(self, hosts, monkeypatch):
        host = hosts(2)
        host.served.start()
        got: list[tuple[int, Any]] = []
        for n, rig in enumerate(host.rigs):
            monkeypatch.setattr(
                rig.supervisor, "receive", lambda message, n=n: got.append((n, message))
            )
        told = [Cancel(task=f"t{n}", epoch=1, seq=1) for n in range(3)]
        news = {"h.0": [encode(told[0])], "h.1": [encode(told[1]), encode(told[2])]}
        host.served.receive(sealed_host_news(host.island, news))
        monkeypatch.undo()
        assert sorted(got, key=str) == [(0, told[0]), (1, told[1]), (1, told[2])]

    def test_news_for_a_device_of_another_worker_are_refused(self, hosts):
        host = hosts(1)
        text = sealed_news(host.island, "elsewhere.0", [])
        with pytest.raises(BadMessage, match=r"elsewhere\.0, which this worker does not serve"):
            host.served.receive(text)

    def test_text_that_is_no_news_is_refused(self, hosts):
        with pytest.raises(BadSignature):
            hosts(1).served.receive("key\nproof\ngarbage")


class TestSettings:
    def test_each_device_has_its_kind_and_which_of_it(self):
        told = "h.0=cuda:GPU-5b3f6c1e-0c33,h.1=cuda:1,h.2,h.3=xpu"
        found = Settings(devices=told).each_device
        assert [(one.device, one.device_kind, one.accelerator) for one in found] == [
            ("h.0", "cuda", "GPU-5b3f6c1e-0c33"),
            ("h.1", "cuda", "1"),
            ("h.2", "cpu", ""),
            ("h.3", "xpu", ""),
        ]

    def test_one_device_can_be_named_as_before(self):
        (one,) = Settings(device="h.0", device_kind="cuda", accelerator="1").each_device
        assert (one.device, one.device_kind, one.accelerator) == ("h.0", "cuda", "1")

    @pytest.mark.parametrize(
        ("told", "why"),
        [
            ("h.0=cuda:0,g.1=cuda:1", "devices of one host"),
            ("h.0,h.0", "each device once"),
            ("h", "like host-b.0=cuda"),
            ("h.0=CUDA:0", "like host-b.0=cuda"),
            ("h.0=cuda: 1", "like host-b.0=cuda"),
        ],
    )
    def test_mistake_is_told_at_the_start(self, told, why):
        with pytest.raises(ValueError, match=why):
            Settings(devices=told)
