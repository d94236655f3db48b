"""Measure how long a command stands still while its processes are stored and move to another host.

    python -m benchmarks.command_migration [--quick]

A plain program with 50 MB, 200 MB, 1 GB and 2 GB of memory (--quick: the first two) runs on a
device worker, and then on a second one. They are real supervisors, zygotes and residents with all
layers of the sandbox. Each device worker has namespaces, folders and users of its own; the store is
shared. In every step the program writes to each page of a twentieth of its memory, and prints the
time by its own clock. The figures:

* frozen: the program is paused, its image is stored, and it goes on where it is. The figure is the
  time between its last step before the pause and its first step after it.
* downtime: the second device worker expects the program, and fetches its image while it runs on. A
  second later the program is paused again and stored. The first device worker drops it; the second
  one launches it, fetches the rest and restores it. The figure is the same time, of this move.
* changed bytes: what the second image adds to the store. The bandwidth is that of the store in the
  same run: the slower of writing and reading random bytes.
* 1 GB into a folder in memory: a dump writes all memory of the program once, and so does a restore.
  Where a hypervisor takes free memory back, that can take ten times as long.
* the peer stops and begins again: the same program runs on device workers without CRIU. The figure
  is the time until the program is where it was when it was stopped.

The program ends with the hash of all its memory, which is compared with a run without a move.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from app.core.model.protocol.messages import (
    CheckpointRef,
    ExpectedTask,
    Finished,
    Launch,
    Paused,
    Saved,
    Started,
)
from app.core.model.provisions.process_images import OFFER
from app.storage.store import Store
from benchmarks import Target, quick, report
from tests.workers.conftest import DeviceRig
from tests.workers.criu import prefixes
from workers.criu import program
from workers.process.isolation.detached_mounts import memory_folder

JSON = dict[str, Any]

MB = 10**6
SIZES = {"50 MB": 50 * MB, "200 MB": 200 * MB, "1 GB": 1000 * MB, "2 GB": 2000 * MB}
ROUNDS = 3  # of each size; the figures are medians
HOT = 20  # one part in so many changes in every step
AHEAD_S = 1.0  # how long it runs between two images
BEYOND_S, PART = 1.0, 0.10
TIMEOUT_S = 120.0
STORED_BYTES, FILLED_BYTES, PIECE_BYTES = 256 * MB, 1000 * MB, 4 * MB

STEPS = 1200

PROGRAM = """
import hashlib, random, sys, time
size, hot, steps = map(int, sys.argv[1:])
random.seed(7)
parts = [bytearray(random.randbytes(1 << 20)) for _ in range(size >> 20)]
for step in range(1, steps + 1):
    for part in parts[::hot]:
        part[step % 4096 :: 4096] = bytes([step % 251]) * 256
    print("step", step, time.time_ns(), flush=True)
    time.sleep(0.01)
digest = hashlib.sha256()
for part in parts:
    digest.update(part)
print("sum", digest.hexdigest(), flush=True)
"""


def main() -> int:
    sizes = dict(list(SIZES.items())[:2]) if quick() else SIZES
    try:
        program.find()
    except program.NoProgram as error:
        return report("command_migration", [], {"not measured": str(error)})
    with (
        tempfile.TemporaryDirectory(prefix="moves-") as folder,
        working_prefix(Path(folder)) as criu,
    ):
        rate, filled_s = _bandwidth(Path(folder) / "rate"), _filled_s()
        rows = {
            name: [
                moved(Path(folder) / f"{number}-{size}", Run(argv_of(size)), criu, alone(size))
                for number in range(1 if quick() else ROUNDS)
            ]
            for name, size in sizes.items()
        }
        again_s = begun_again(Path(folder) / "again", SIZES["200 MB"])
    for row in (row for of_size in rows.values() for row in of_size):
        row["beyond_s"] = row["downtime_s"] - row["second_bytes"] / rate
    return report("command_migration", targets(rows), peers(rows, rate, filled_s, again_s))


def targets(rows: dict[str, list[JSON]]) -> list[Target]:
    """Return the targets; a figure with several sizes is taken at its worst size."""
    beyond = max(_median(of_size, "beyond_s") for of_size in rows.values())
    part = max(_median(of_size, "second_part") for of_size in rows.values())
    differ = sum(row["differs"] for of_size in rows.values() for row in of_size)
    return [
        _target("downtime beyond the changed bytes, s", beyond, "s", BEYOND_S),
        _target("second image, part of the first", part, "of it", PART),
        _target("bits differ, programs", differ, "programs", 0),
    ]


def _target(name: str, value: float, unit: str, bound: float) -> Target:
    return Target(name=name, value=round(value, 3), unit=unit, op="<=", bound=bound)


def _median(rows: list[JSON], name: str) -> float:
    return float(statistics.median(row[name] for row in rows))


def peers(rows: dict[str, list[JSON]], rate: float, filled_s: float, again_s: float) -> JSON:
    told: JSON = {
        "moves of each size": len(next(iter(rows.values()))),
        "bandwidth of the store (slower way), MB/s": round(rate / MB),
        "1 GB into a folder in memory, s": round(filled_s, 2),
        "stop and begin again, 200 MB, until it is where it was, s": round(again_s, 2),
        "load average": round(os.getloadavg()[0], 1),
    }
    for name, of_size in rows.items():
        told[name] = {
            "image, MB": round(_median(of_size, "image_bytes") / MB, 1),
            "first image writes, MB": round(_median(of_size, "first_bytes") / MB, 1),
            "second image writes, MB": round(_median(of_size, "second_bytes") / MB, 1),
            "frozen, s": round(_median(of_size, "frozen_s"), 2),
            "downtime, s": round(_median(of_size, "downtime_s"), 2),
            "downtime beyond the changed bytes, s": round(_median(of_size, "beyond_s"), 2),
            "until paused, stored, started, s": [row["parts_s"] for row in of_size],
        }
    return told


# --- moves ----------------------------------------------------------------------------------------


def moved(home: Path, run: Run, criu: str, last_line: str) -> JSON:
    """Store a program twice and move it once; return the times and bytes.

    `last_line` is what the program prints at its end if it is not moved.
    """
    (home / "store").mkdir(parents=True)
    with _host(home, 0, criu) as here, _host(home, 1, criu) as there:
        run.on(here)
        first = run.stored()
        run.on(here)
        frozen_s = run.stood_s()
        run.fetched_ahead(there)
        second = run.stored()
        parts_s = [run.paused_s, run.stored_s]
        here.drop = [["t", run.epoch]]
        began_s = time.monotonic()
        started = run.on(there)
        there.expected = []  # else it is fetched again while the folder of the store goes
        parts_s.append(time.monotonic() - began_s)
        if started.resumed != "image":
            raise RuntimeError(f"it began again: {run.lines()}")
        downtime_s = run.stood_s()
        there.event(Finished, "t", run.epoch, timeout_s=TIMEOUT_S)
        there.until(lambda: there.view("t", run.epoch) is None)
        said = run.lines()[-1]
    return {
        "image_bytes": second.size_bytes,
        "first_bytes": first.new_bytes,
        "second_bytes": second.new_bytes,
        "second_part": second.new_bytes / first.new_bytes,
        "frozen_s": frozen_s,
        "downtime_s": downtime_s,
        "parts_s": [round(part_s, 2) for part_s in parts_s],
        "differs": said != last_line,
    }


def begun_again(home: Path, size: int) -> float:
    """Return the seconds from a stop until a program that begins again has come as far as
    before.
    """
    (home / "store").mkdir(parents=True)
    run = Run(argv_of(size))
    with _host(home, 0, "/none") as here, _host(home, 1, "/none") as there:
        run.on(here)
        run.stored()
        last, stopped_ns = run.steps()[-1]
        here.supervisor.stop()
        run.on(there)
        there.until(lambda: any(step == last for step, _ in run.steps(run.epoch)))
        again_ns = next(at_ns for step, at_ns in run.steps(run.epoch) if step == last)
    return (again_ns - stopped_ns) / 1e9


class Run:
    """Runs a program on one device worker after another; `asked` are fields of its launch."""

    def __init__(self, argv: list[str], **asked: Any) -> None:
        self.argv, self.asked = argv, asked
        self.epoch, self.images = 0, list[CheckpointRef]()
        self.rigs: dict[int, DeviceRig] = {}
        self.launches: dict[int, Launch] = {}
        self.paused_s = self.stored_s = 0.0

    def on(self, rig: DeviceRig) -> Started:
        """Launch the program on this device worker; return when it has made two steps."""
        self.epoch += 1
        self.rigs[self.epoch] = rig
        self.launches[self.epoch] = rig.launch(
            "t", self.argv, self.epoch, images=self.images, budget_us=10**9, **self.asked
        )
        started: Started = rig.event(Started, "t", self.epoch, timeout_s=TIMEOUT_S)
        rig.until(lambda: len(self.steps(self.epoch)) > 1, timeout_s=TIMEOUT_S)
        return started

    def ahead(self) -> None:
        """Let the program run a while."""
        until_ns = self.steps(self.epoch)[-1][1] + int(AHEAD_S * 1e9)
        self.rigs[self.epoch].until(lambda: self.steps(self.epoch)[-1][1] >= until_ns)

    def fetched_ahead(self, rig: DeviceRig) -> None:
        """Announce the program to this device worker; return when its image is there."""
        (image,), launched = self.images, self.launches[self.epoch]
        rig.expected = [
            ExpectedTask(
                task="t",
                epoch=self.epoch,
                tenant=launched.tenant,
                bundle=launched.bundle,
                inputs=[],
                image=image,
                image_key=rig.image_key("t", self.epoch),
            )
        ]

        def is_there() -> bool:
            return any(ahead["sha256"] == image.sha256 for ahead in rig.reports[-1].ahead)

        rig.until(is_there, timeout_s=TIMEOUT_S)

    def stored(self) -> Saved:
        """Pause the program; return its image when the image is durable."""
        self.ahead()
        rig, began_s = self.rigs[self.epoch], time.monotonic()
        rig.pause("t", self.epoch)
        paused = rig.event(Paused, "t", self.epoch, timeout_s=TIMEOUT_S)
        self.paused_s = time.monotonic() - began_s

        def saved() -> Saved | None:
            there = rig.all(Saved, "t", self.epoch)
            return next((saved for saved in there if saved.step == paused.step), None)

        image: Saved = rig.until(saved, timeout_s=TIMEOUT_S)
        self.stored_s = time.monotonic() - began_s - self.paused_s
        self.images = [rig.image(image)]
        return image

    def lines(self) -> list[str]:
        return [
            line for epoch, rig in self.rigs.items() for line in rig.printed("t", epoch)
        ]  # fmt: skip

    def steps(self, epoch: int = 0) -> list[tuple[int, int]]:
        """Return (step, its time in ns) of one epoch, or of all."""
        lines = self.rigs[epoch].printed("t", epoch) if epoch else self.lines()
        words = [line.split() for line in lines if line.startswith("step ")]
        return [(int(step), int(at_ns)) for _, step, at_ns in words]

    def stood_s(self) -> float:
        """Return the longest time between two steps around the beginning of this epoch."""
        last, (first, second) = self.steps(self.epoch - 1)[-1], self.steps(self.epoch)[:2]
        if first[0] != last[0] + 1:
            raise RuntimeError(f"after step {last[0]} came step {first[0]}")
        # it may have been stopped after it looked at the clock and before it printed the line
        return max(first[1] - last[1], second[1] - first[1]) / 1e9


def argv_of(size: int) -> list[str]:
    return ["python", "-c", PROGRAM, str(size), str(HOT), str(STEPS)]


@functools.cache
def alone(size: int) -> str:
    """Return the last line that the program prints if it is neither paused nor moved."""
    words = [sys.executable, "-c", PROGRAM, str(size), str(HOT), str(STEPS)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


# --- hosts ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _host(home: Path, number: int, criu: str) -> Iterator[DeviceRig]:
    own = home / f"host{number}"
    own.mkdir(mode=0o755)
    (own / "store").symlink_to(home / "store")
    rig = DeviceRig(
        own, lease_s=60.0, device=f"h{number}.0", criu=criu, host_memory_bytes=8 * 2**30
    )
    rig.open()
    try:
        if criu != "/none":
            rig.until(lambda: OFFER in rig.reports[-1].facts["offers"])
        yield rig
    finally:
        rig.close()


@contextlib.contextmanager
def working_prefix(folder: Path) -> Iterator[str]:
    """Yield a CRIU that works here.

    Without CAP_SYS_RESOURCE it needs a stand-in, as in tests.
    """
    if prefixes.may_read_limits():
        yield str(program.PREFIX)
    else:
        yield str(prefixes.with_limits_from_proc(program.PREFIX, folder / "criu"))


def _bandwidth(home: Path) -> float:
    """Return the bytes per second into a store and back: the slower of the two."""
    store = Store.at(home)
    bodies = [os.urandom(PIECE_BYTES) for _ in range(STORED_BYTES // PIECE_BYTES)]
    addresses = [blake3(body).hexdigest() for body in bodies]
    chunks = store.chunks("rate")
    began_s = time.monotonic()
    with chunks.writing() as writing:
        for address, body in zip(addresses, bodies, strict=True):
            writing.put(address, body)
        writing.settle()
    written_s = time.monotonic()
    for address in addresses:
        chunks.get(address, PIECE_BYTES)
    return STORED_BYTES / max(written_s - began_s, time.monotonic() - written_s)


def _filled_s() -> float:
    """Return the seconds in which 1 GB is written into a folder in memory, as CRIU does."""
    body = bytes(PIECE_BYTES)
    with memory_folder(2 * FILLED_BYTES) as folder, (folder / "filled").open("wb", 0) as file:
        began_s = time.monotonic()
        for _ in range(FILLED_BYTES // PIECE_BYTES):
            file.write(body)
        return time.monotonic() - began_s


if __name__ == "__main__":
    sys.exit(main())
