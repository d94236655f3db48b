"""Give each test a device of its own: a real supervisor, zygote and residents.

The test plays the island: a `DeviceRig` hears every report and answers it at once, unless a test
makes it deaf.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import (
    Alive,
    Answer,
    Cancel,
    CheckpointRef,
    Event,
    ExpectedTask,
    Launch,
    LeaseRenewal,
    Pause,
    Paused,
    Pulse,
    ReportWanted,
    Resize,
    Save,
    Saved,
    Started,
    about_image_key,
    decode,
    encode,
    key,
)
from app.core.model.provisions.mounts import digest
from app.core.scheduling.sharing.turns import Level, Share, as_json
from app.storage.sealing import sealed_to
from app.storage.store import Store
from tests.launches import image_of, launch_of
from tests.sim import orders
from tests.workers import warm_zygotes as warm
from workers.device.supervisor import Supervisor
from workers.process.isolation.device_access import find_access
from workers.transfer.host_context import House

ROOT = Path(__file__).parent.parent.parent
BUNDLE = Path(__file__).parent / "bundle"
CODE = {path.name: path.read_text() for path in BUNDLE.glob("*.py")} | {"broken.py": "def ("}
PRESET = {
    "threads": 1,
    "interop_threads": 1,
    "deterministic": True,
    "float32_matmul_precision": "highest",
    "flush_denormal": False,
}


def alone(entry: str, params: dict[str, Any], kind: str = "cpu") -> Any:
    """What the job gives when it runs undisturbed, in a process of its own without a sandbox.

    A job that was asked about before is not run again.
    """
    return json.loads(_said_alone(entry, json.dumps(params), kind))


@functools.cache
def _said_alone(entry: str, params: str, kind: str) -> bytes:
    words = (str(BUNDLE), entry, "--params", params, "--preset", json.dumps(PRESET), "--kind", kind)
    said = warm.said_by("examples.job_alone", *words, kind=kind)
    return said.splitlines()[-1]


def bundled(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # equal files are an equal bundle
    return out.getvalue()


def words_in_memory(pid: int, *words: str) -> list[str]:
    """Return which of the words are in the memory that a fork of the process inherits."""
    found = dict[str, None]()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for where, may, *_ in map(str.split, maps):
            if may != "rw-p":
                continue
            begin, end = (int(address, 16) for address in where.split("-"))
            held = os.pread(memory.fileno(), end - begin, begin)
            found |= {word: None for word in words if word.encode() in held}
    return [*found]


def _run(run: str | list[str] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(run, dict):
        return run
    if isinstance(run, list):
        return {"command": run}
    return {"function" if run.partition(":")[2][0].islower() else "job": run}


IMAGE_KEY = "5e" * 32  # with which the images of commands are encrypted

QUICK_BEAT_S = 0.05  # for a test that waits for many reports: each takes some lines of a log

PATIENCE_S = 90.0  # for what comes soon, but on a slow machine beside other tests

_HURRIED = {"lease_margin_s": 1.0, "beat_s": 0.5, "stop_grace_s": 1.0}


@contextlib.contextmanager
def separate_device(home: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a device in a process of its own (`tests.workers.separate`) until its job steps."""
    device = subprocess.Popen(
        [sys.executable, "-m", "tests.workers.separate", str(home), *options],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert device.stdout is not None
    try:
        assert device.stdout.readline() == b"running\n"
        yield device
    finally:
        device.kill()
        device.wait()
        device.stdout.close()


class DeviceRig:
    """The island, as far as one device can tell."""

    def __init__(
        self, home: Path, *, lease_s: float = 30.0, grace_s: float = 0.0, **house: Any
    ) -> None:
        self.store = Store.at(home / "store")
        self.bundle, _ = self.store.put([bundled(CODE)])
        self.lease_s, self.grace_s = lease_s, grace_s
        self.deaf = False
        self.drop: list[list[Any]] = []
        self.wanted = True
        self.expected: list[ExpectedTask] = []  # that are being moved here
        self.check = 0  # number of the health check that is asked for
        self.mounts: dict[str, str] = {}  # the path of each registered mount, by name
        self.environments: list[str] = []  # locks that tasks wait for
        self.images: dict[str, str] = {}  # and of each container image
        self.reports: list[Alive] = []
        self.takes_pulses = False
        self.pulses: list[Pulse] = []
        self.events: list[Event] = []
        self.lines: dict[str, list[list[str]]] = {}
        self.changed = threading.Condition()
        self.house = House(
            island="test",
            store=self.store,
            run=home / "run",
            **{**_HURRIED, "device": "h.0", "sandbox": "preferred", "criu": "/none", **house},
        )
        self.begin()
        self.orders: dict[tuple[str, int], int] = {}
        self.weights: dict[str, int] = {}  # of the tasks that share the device
        self.held_us: dict[tuple[str, int], int] = {}  # by each stay
        self.broken: AssertionError | None = None  # the first promise that a report broke

    def begin(self) -> None:
        """Make the supervisor; a test starts it."""
        self.supervisor = Supervisor(self.house, self)

    # --- the transport ---

    def send(self, heartbeat: Alive | Pulse) -> None:
        alive = decode(encode(heartbeat))
        if isinstance(alive, Pulse):
            self._hear_pulse(alive)
            return
        with self.changed:
            if self.deaf:
                return
            self.reports.append(alive)
            try:
                heard = self._hear(alive)
            except AssertionError as broken:
                self.broken = broken
                raise
            self.changed.notify_all()
        self.supervisor.receive(
            Answer(
                device=alive.device,
                incarnation=alive.incarnation,
                sent_us=alive.sent_us,
                lease_us=int(self.lease_s * 1e6),
                grace_us=min(alive.grace_us, int(self.grace_s * 1e6)),
                heard=heard,
                logged={name: len(lines) for name, lines in self.lines.items()},
                keep=[
                    [v.task, v.epoch] for v in alive.residents if [v.task, v.epoch] not in self.drop
                ],
                drop=self.drop,
                expect=self.expected,
                wanted=self.wanted,
                rota=[as_json(share) for share in self._shares(alive)],
                check=self.check,
                environments=self.environments,
                mounts=self._unknown(alive.facts.get("mounts"), self.mounts),
                images=self._unknown(alive.facts.get("images"), self.images),
                pulses=self.takes_pulses,
            )
        )

    def _hear_pulse(self, pulse: Pulse) -> None:
        """Renew the lease, or ask for the report if pulses are not taken any more."""
        with self.changed:
            self.pulses.append(pulse)
            self.changed.notify_all()
        about: dict[str, Any] = {"device": pulse.device, "incarnation": pulse.incarnation}
        about["sent_us"] = pulse.sent_us
        self.supervisor.receive(
            LeaseRenewal(**about, answer=pulse.answer)
            if self.takes_pulses
            else ReportWanted(**about)
        )

    def _unknown(self, known: str | None, present: dict[str, str]) -> dict[str, str] | None:
        return None if known in (None, digest(present)) else present

    def _shares(self, alive: Alive) -> list[Share]:
        """Tenants beside each other, who used nothing but this device; `t+` is of the same as t."""
        here = [v for v in alive.residents if v.state in ("seating", "running")]
        self.held_us |= {(v.task, v.epoch): v.held_us for v in alive.residents}
        used = Counter[str]()
        for (task, _), held_us in self.held_us.items():
            used[task.rstrip("+")] += 1000 * held_us
        return [
            Share(
                task=view.task,
                epoch=view.epoch,
                place=len(view.task),
                held_us=view.held_us,
                rate=1000,
                path=(Level(name=user, used=used[user], weight=self.weights[user]),),
            )
            for view in here
            if (user := view.task.rstrip("+")) in self.weights
        ]

    def _hear(self, alive: Alive) -> dict[str, int]:
        heard: dict[str, int] = {}
        for event in alive.events:
            if (event.task, event.epoch) not in self.orders:
                heard[key(event.task, event.epoch)] = event.seq
                continue  # of a test that is over
            known = [e for e in self.events if (e.task, e.epoch) == (event.task, event.epoch)]
            assert event.seq <= len(known) + 1, f"a gap before {event}"
            if event.seq == len(known) + 1:
                self.events.append(event)
            heard[key(event.task, event.epoch)] = event.seq
        for part in alive.logs:
            lines = self.lines.setdefault(key(part.task, part.epoch), [])
            assert part.first <= len(lines), f"a gap before line {part.first}"
            lines.extend(part.lines[len(lines) - part.first :])
        return heard

    # --- orders ---

    def launch(
        self, task: str, run: str | list[str] | dict[str, Any], epoch: int = 1, **more: Any
    ) -> Launch:
        """`run` is an entry of the bundle, the words of a command, or what an order says."""
        self.orders[task, epoch] = 1
        if isinstance(run, list):
            more = {"image_key": self.image_key(task, epoch), **more}
        order = launch_of(
            task,
            epoch,
            **{
                "run": _run(run),
                "bundle": self.bundle,
                "preset": PRESET,
                "budget_us": 600_000_000,
                **more,
            },
        )
        self.supervisor.receive(order)
        return order

    def image_key(self, task: str, epoch: int = 1) -> dict[str, str]:
        """Return the key of images as a launch has it for this host."""
        house = self.house
        about = about_image_key(task, epoch, house.device)
        announced, host_key = house.facts["sealing_key"], house.signer.public
        return {"sealed": sealed_to(announced, IMAGE_KEY, about, host_key=host_key)}

    def pause(self, task: str, epoch: int = 1, **more: Any) -> None:
        self.supervisor.receive(Pause(task=task, epoch=epoch, seq=self._seq(task, epoch), **more))

    def save(self, task: str, epoch: int = 1) -> None:
        self.supervisor.receive(Save(task=task, epoch=epoch, seq=self._seq(task, epoch)))

    def cancel(self, task: str, epoch: int = 1) -> None:
        self.supervisor.receive(Cancel(task=task, epoch=epoch, seq=self._seq(task, epoch)))

    def resize(self, task: str, seats: int, epoch: int = 1, guests: Sequence[str] = ()) -> None:
        seq = self._seq(task, epoch)
        order = Resize(task=task, epoch=epoch, seq=seq, seats=[seats], guests=[*guests])
        self.supervisor.receive(order)

    def folder(self, task: str, epoch: int = 1) -> Path:
        """Return the working folder of a task that has started."""
        residents = list(self.supervisor.stays.residents.values())
        (here,) = (each for each in residents if each.stay.key == (task, epoch))
        return Path(f"/proc/{here.pid}/cwd")

    def drop_all(self) -> None:
        """Want no task any more, so that a device which is closed waits for none."""
        self.drop += map(list, self.orders)

    def let_end(self, task: str, epoch: int = 1) -> None:
        """Make the file `end` in the folder of a task that has started: it waits for the file."""
        (self.folder(task, epoch) / "end").touch()

    def _seq(self, task: str, epoch: int) -> int:
        self.orders[task, epoch] += 1
        return self.orders[task, epoch]

    # --- looking ---

    def until(self, true: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Wait, over as many reports as it takes; what `true` returned."""
        with self.changed:
            found = self.changed.wait_for(true, timeout_s)
            told = f"{self.broken}; heard: {self.events}; printed: {self.lines}"
            assert found, f"not within {timeout_s} s; {told[:8000]}"
            return found

    def event(self, kind: type[Event], task: str, epoch: int = 1, **wait: Any) -> Any:
        def there() -> Event | None:
            return next(iter(self.all(kind, task, epoch)), None)

        return self.until(there, **wait)

    def all(self, kind: type[Event], task: str, epoch: int = 1) -> list[Any]:
        return [
            e for e in self.events if isinstance(e, kind) and (e.task, e.epoch) == (task, epoch)
        ]

    def view(self, task: str, epoch: int = 1) -> Any:
        """How the newest report shows it, or None."""
        held = self.reports[-1].residents if self.reports else []
        return next((v for v in held if (v.task, v.epoch) == (task, epoch)), None)

    def views(self, task: str, epoch: int = 1) -> list[Any]:
        """Return how each report showed it so far, also those that came between two looks."""
        held = [view for report in list(self.reports) for view in report.residents]
        return [view for view in held if (view.task, view.epoch) == (task, epoch)]

    def steps(self, task: str, at_least: int, epoch: int = 1) -> Any:
        """Wait until the task has made so many steps; return how it was shown last.

        A task may have ended before this is looked at: then no new report shows it.
        """

        def there() -> Any:
            newest_first = reversed(self.views(task, epoch))
            return next((view for view in newest_first if view.step >= at_least), None)

        return self.until(there)

    def went_on_from(self, saved: Saved) -> bool:
        """Return whether the next epoch began at this image, or at a newer one kept here.

        A task that is dropped tells no more of its checkpoints: one that was being stored at that
        moment is newer than all that were told.
        """
        told = {one.step for one in self.all(Saved, saved.task, saved.epoch)}
        began = self.event(Started, saved.task, saved.epoch + 1)
        newest = began.step in told or began.step > max(told)
        return began.resumed == "image" and newest and began.step >= saved.step > 0

    def paused_and_saved(self, task: str, epoch: int) -> list[CheckpointRef]:
        """Pause the task; return the checkpoint of where it stood, as a Launch names it."""
        self.pause(task, epoch)
        paused = self.event(Paused, task, epoch)

        def saved() -> Saved | None:
            there = self.all(Saved, task, epoch)
            return next((saved for saved in there if saved.step == paused.step), None)

        return [self.image(self.until(saved))]

    def image(self, saved: Saved) -> CheckpointRef:
        """The checkpoint as a Launch names it."""
        return image_of(saved.sha256, saved.step, self.house.signer.public)

    def printed(self, task: str, epoch: int = 1) -> list[str]:
        return [text for _, text in self.lines.get(key(task, epoch), [])]

    # --- life ---

    def open(self) -> None:
        self.supervisor.start()
        self.until(lambda: self.reports)

    def close(self) -> None:
        self.supervisor.stop()
        deadline_s = time.monotonic() + PATIENCE_S
        while self.supervisor.is_alive() and time.monotonic() < deadline_s:
            self.supervisor.join(0.1)
        assert not self.supervisor.is_alive()
        sender = self.supervisor.reports.sender
        if sender.is_alive():  # it may still be sending the last report
            sender.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def no_staging_of_another_test() -> Iterator[None]:
    """A resident has one `Staging`; here one after the other lives in one process.

    At an optimizer's step those before would let go of memory that is this test's by now.
    """
    yield
    if optimizers := sys.modules.get("torch.optim.optimizer"):
        optimizers._global_optimizer_pre_hooks.clear()


@pytest.fixture(scope="session", autouse=True)
def warm_zygotes() -> Iterator[None]:
    with warm.forked_from_a_warm_process():
        yield


@pytest.fixture
def fresh_zygotes() -> Iterator[None]:
    """For tests of a zygote's own start: it starts as it does in a device worker."""
    with warm.started_afresh():
        yield


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Callable[..., DeviceRig]]:
    """Makes devices; all of them are closed at the end."""
    opened = []

    def make(**options: Any) -> DeviceRig:
        made = DeviceRig(options.pop("home", tmp_path), **options)
        made.open()
        opened.append(made)
        return made

    yield make
    for made in opened:
        if made.supervisor.is_alive():
            made.drop_all()
            made.close()


@pytest.fixture
def accelerators(rigs: Callable[..., DeviceRig], tmp_path: Path) -> Callable[..., DeviceRig]:
    """Make a device worker of a simulated accelerator with so much memory."""

    def make(memory_bytes: int, **options: Any) -> DeviceRig:
        home = tmp_path / "accelerator"
        home.mkdir()
        home.chmod(0o755)
        node = home / "budget"  # in the place of a device node
        node.touch()
        node.chmod(0o666)
        environ = {
            "SIM_DEVICES": "1",
            **orders.ENVIRON,
            "SIM_HOME": str(home),
            "SIM_MEMORY_BYTES": str(memory_bytes),
        }
        access = find_access("sim", "0", environ=environ, nodes=(node,))
        return rigs(kind="sim", access=access, memory_bytes=memory_bytes, **options)

    return make


@pytest.fixture
def rig(rigs: Callable[..., DeviceRig]) -> DeviceRig:
    """A device with nothing special about it."""
    return rigs()


@pytest.fixture
def refuse(rig: DeviceRig, monkeypatch: pytest.MonkeyPatch):
    """A function that lets the store refuse what is written, by an error; None: it takes all."""
    monkeypatch.setattr("workers.device.stays.resident_messages.STORE_AGAIN_US", 10_000)
    monkeypatch.setattr("workers.device.stays.storing.SAVE_AGAIN_US", 50_000)
    place, usual = rig.store.place, {}

    def set_to(error: BaseException | None) -> None:
        for name in ("keep", "batch"):
            usual.setdefault(name, getattr(place, name))
            if error is None:
                monkeypatch.setattr(place, name, usual[name])
            else:
                monkeypatch.setattr(place, name, lambda *_, error=error, **__: _raise(error))

    return set_to


def _raise(error: BaseException) -> None:
    raise error
