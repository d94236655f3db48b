"""A device of its own for each test: a real supervisor, zygote and residents; the island is played.

`Ground` is what the island would see and say.  It hears every report and answers it at once, unless
a test makes it deaf.
"""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.core.model.messages import (
    Alive,
    Answer,
    Cancel,
    Event,
    Launch,
    Pause,
    Resize,
    Save,
    Saved,
    Started,
    decode,
    encode,
    key,
)
from app.core.scheduling.turns import Level, Share, as_json
from app.storage.store import Store
from tests.workers import warm_zygotes as warm
from workers.device.supervisor import Supervisor
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


def alone(entry: str, params: dict[str, Any]) -> Any:
    """What the job gives when it runs undisturbed, in a plain process of its own.

    A job that was asked about before is not run again.
    """
    return json.loads(_said_alone(entry, json.dumps(params)))


@functools.cache
def _said_alone(entry: str, params: str) -> bytes:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "workers.residents.run_alone", str(BUNDLE), entry),
            *("--params", params, "--preset", json.dumps(PRESET)),
        ],
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    return done.stdout.splitlines()[-1]


def bundled(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


def _run(run: str | list[str] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(run, dict):
        return run
    if isinstance(run, list):
        return {"command": run}
    return {"function" if run.partition(":")[2][0].islower() else "job": run}


_HURRIED = {"lease_margin_s": 1.0, "beat_s": 0.5, "stop_grace_s": 1.0}


class Ground:
    """The island, as far as one device can tell."""

    def __init__(self, home: Path, *, lease_s: float = 6.0, **house: Any) -> None:
        self.store = Store.at(home / "store")
        self.bundle, _ = self.store.put([bundled(CODE)])
        self.lease_s = lease_s
        self.deaf = False
        self.drop: list[list[Any]] = []
        self.wanted = True
        self.reports: list[Alive] = []
        self.events: list[Event] = []
        self.lines: dict[str, list[list[str]]] = {}
        self.changed = threading.Condition()
        self.house = House(
            device="h.0",
            island="test",
            store=self.store,
            run=home / "run",
            **{**_HURRIED, "sandbox": "preferred", **house},
        )
        self.supervisor = Supervisor(self.house, self)
        self.orders: dict[tuple[str, int], int] = {}
        self.weights: dict[str, int] = {}  # of the tasks that share the device
        self.held_us: dict[tuple[str, int], int] = {}  # by each stay
        self.broken: AssertionError | None = None  # the first promise that a report broke

    # --- the transport ---

    def send(self, alive: Alive) -> None:
        alive = decode(encode(alive))
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
                heard=heard,
                logged={name: len(lines) for name, lines in self.lines.items()},
                keep=[
                    [v.task, v.epoch] for v in alive.residents if [v.task, v.epoch] not in self.drop
                ],
                drop=self.drop,
                wanted=self.wanted,
                rota=[as_json(share) for share in self._shares(alive)],
            )
        )

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
        order = Launch(
            task=task,
            epoch=epoch,
            seq=1,
            **{
                "tenant": "ten",
                "run": _run(run),
                "bundle": self.bundle,
                "params": {},
                "inputs": {},
                "outputs": [],
                "world_size": 1,
                "preset": PRESET,
                "images": [],
                "budget_us": 60_000_000,
                "checkpoint_every_s": 0.0,
                "memory_bytes": 0,
                **more,
            },
        )
        self.supervisor.receive(order)
        return order

    def pause(self, task: str, epoch: int = 1) -> None:
        self.supervisor.receive(Pause(task=task, epoch=epoch, seq=self._seq(task, epoch)))

    def save(self, task: str, epoch: int = 1) -> None:
        self.supervisor.receive(Save(task=task, epoch=epoch, seq=self._seq(task, epoch)))

    def cancel(self, task: str, epoch: int = 1) -> None:
        self.supervisor.receive(Cancel(task=task, epoch=epoch, seq=self._seq(task, epoch)))

    def resize(self, task: str, seats: int, epoch: int = 1) -> None:
        seq = self._seq(task, epoch)
        self.supervisor.receive(Resize(task=task, epoch=epoch, seq=seq, seats=[seats]))

    def _seq(self, task: str, epoch: int) -> int:
        self.orders[task, epoch] += 1
        return self.orders[task, epoch]

    # --- looking ---

    def until(self, true: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """Wait, over as many reports as it takes; what `true` returned."""
        with self.changed:
            found = self.changed.wait_for(true, timeout_s)
            assert found, f"not within {timeout_s} s; {self.broken}; heard: {self.events}"
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

    def steps(self, task: str, at_least: int, epoch: int = 1) -> Any:
        def there() -> Any:
            view = self.view(task, epoch)
            return view if view is not None and view.step >= at_least else None

        return self.until(there)

    def went_on_from(self, saved: Saved) -> bool:
        """Did the next epoch begin at this image, or a newer one that this one kept here?"""
        kept = {one.step for one in self.all(Saved, saved.task, saved.epoch)}
        began = self.event(Started, saved.task, saved.epoch + 1).step
        return began in kept and began >= saved.step > 0

    def image(self, saved: Saved) -> dict[str, Any]:
        """The checkpoint as a Launch names it."""
        return {"sha256": saved.sha256, "step": saved.step, "key": self.house.signer.public}

    def printed(self, task: str, epoch: int = 1) -> list[str]:
        return [text for _, text in self.lines.get(key(task, epoch), [])]

    # --- life ---

    def open(self) -> None:
        self.supervisor.start()
        self.until(lambda: self.reports, timeout_s=40.0)

    def close(self) -> None:
        self.supervisor.stop()
        deadline_s = time.monotonic() + 10
        while self.supervisor.is_alive() and time.monotonic() < deadline_s:
            self.supervisor.join(0.1)
        assert not self.supervisor.is_alive()


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
def grounds(tmp_path: Path) -> Iterator[Callable[..., Ground]]:
    """Makes devices; all of them are closed at the end."""
    opened = []

    def make(**options: Any) -> Ground:
        made = Ground(options.pop("home", tmp_path), **options)
        made.open()
        opened.append(made)
        return made

    yield make
    for made in opened:
        if made.supervisor.is_alive():
            made.close()


@pytest.fixture
def ground(grounds: Callable[..., Ground]) -> Ground:
    """A device with nothing special about it."""
    return grounds()
