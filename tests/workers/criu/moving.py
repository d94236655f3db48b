"""Moves programs between two device workers, each of which plays a host of its own.

The residents of each have other namespaces, folders and users.  What is left at a device that a
program has left is killed there before the program goes on at the other one.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.core.model.protocol.messages import (
    CheckpointRef,
    Event,
    Failed,
    Finished,
    Paused,
    Saved,
    Started,
    key,
)
from app.core.model.provisions.process_images import OFFER
from app.core.security.sandbox_layers import LAYERS
from app.settings import settings
from tests.workers.conftest import DeviceRig, bundled
from workers.process import uv
from workers.process.isolation import sandbox

TOLD = "Roundhouse: "
SEED = int(os.environ.get("MOVES_SEED", "26"))
END_S = 90.0  # on a slow machine beside other tests


@dataclass
class MovedRun:
    """What a program printed over all its moves, and how it began on each device."""

    printed: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # what Roundhouse said in its log
    begun: list[str] = field(default_factory=list)
    end: str = ""

    @property
    def moves(self) -> int:
        return len(self.begun) - 1

    @property
    def times_begun_again(self) -> int:
        return self.begun[1:].count("folder")


def skip_without_layers(rig: DeviceRig) -> None:
    """Skip the test where the sandbox lacks a layer: there a device worker stores no processes."""
    if lacks := LAYERS.keys() - rig.reports[-1].facts["sandbox"]:
        pytest.skip(f"the sandbox lacks layers here: {', '.join(sorted(lacks))}")


@contextmanager
def hosts(home: Path, criu: Path, count: int = 2) -> Iterator[list[DeviceRig]]:
    """Give device workers with one store, each of which stores processes."""
    (home / "store").mkdir()
    made: list[DeviceRig] = []
    try:
        for number in range(count):
            own = home / f"host{number}"
            own.mkdir(mode=0o755)
            (own / "store").symlink_to(home / "store")
            rig = DeviceRig(
                own,
                lease_s=30.0,
                device=f"h{number}.0",
                criu=str(criu),
                package_options=tuple(uv.index_options(settings())),
                package_hosts=uv.reach(settings()),
            )
            rig.open()
            made.append(rig)
            skip_without_layers(rig)
        for rig in made:
            rig.until(lambda rig=rig: OFFER in rig.reports[-1].facts["offers"])
        yield made
    finally:
        for rig in made:
            rig.close()


def moved(
    rigs: list[DeviceRig],
    task: str,
    source: str,
    moments: random.Random,
    most: int,
    *,
    is_imported: bool = False,
    within_s: float = 1.0,
    **more: Any,
) -> MovedRun:
    """Run a program, and move it at up to so many random moments, each `within_s` of a start.

    With `is_imported` the first of them comes after its first line.
    """
    bundle, _ = rigs[0].store.put([bundled({"p.py": source})])
    run, images, epoch = MovedRun(), list[CheckpointRef](), 0
    while not run.end:
        epoch += 1
        rig = rigs[epoch % len(rigs)]
        rig.launch(task, ["python", "p.py"], epoch, images=images, bundle=bundle, **more)
        started = rig.event(Started, task, epoch, timeout_s=END_S)
        run.begun.append(started.resumed)
        if run.moves < most:
            if is_imported and epoch == 1:
                rig.until(lambda rig=rig: rig.printed(task), timeout_s=END_S)
            with rig.changed:
                rig.changed.wait_for(lambda: False, moments.random() * within_s)
            rig.pause(task, epoch)
        images = _stored_or_ended(rig, task, epoch)
        if not images:
            run.end = type(_ended(rig, task, epoch)[0]).__name__
        _drop(rig, task, epoch)
        _read(rig, task, epoch, run, printed=_printed_before_image(rig, task, epoch, images))
    return run


def _stored_or_ended(rig: DeviceRig, task: str, epoch: int) -> list[CheckpointRef]:
    """Wait until it has ended, or is paused and its image is stored; return the image."""

    def found() -> list[CheckpointRef] | bool:
        if _ended(rig, task, epoch):
            return True
        at = {paused.step for paused in rig.all(Paused, task, epoch)}
        saved = [saved for saved in rig.all(Saved, task, epoch) if saved.step in at]
        return [rig.image(saved[-1])] if saved else False

    images = rig.until(found, timeout_s=END_S)
    return [] if images is True else images


def _drop(rig: DeviceRig, task: str, epoch: int) -> None:
    """Have the device kill what it has of the task, as an island does when it goes on elsewhere."""
    rig.drop = [[task, epoch]]
    rig.until(lambda: rig.view(task, epoch) is None, timeout_s=END_S)
    rig.drop = []


def _ended(rig: DeviceRig, task: str, epoch: int) -> list[Event]:
    return rig.all(Finished, task, epoch) + rig.all(Failed, task, epoch)


def _printed_before_image(
    rig: DeviceRig, task: str, epoch: int, images: list[CheckpointRef]
) -> int | None:
    """Return how many lines of this epoch had been printed when the processes were stored; None if
    no image of theirs follows.

    An island withdraws the later lines (`outputs.withdraw_lines`), as the restored processes print
    them again: on a busy machine a process may still print between its image and its end.
    """
    saved = rig.all(Saved, task, epoch)
    if not images or not saved or not saved[-1].has_processes:
        return None
    of_epoch, lines = saved[-1].printed
    return lines if of_epoch == epoch else 0


def _read(
    rig: DeviceRig, task: str, epoch: int, run: MovedRun, *, printed: int | None = None
) -> None:
    lines = rig.lines.get(key(task, epoch), [])[:printed]
    if run.begun[-1] == "folder":
        run.printed = []  # it prints all again
    run.printed += [text for stream, text in lines if stream == "stdout"]
    run.told += [text.removeprefix(TOLD) for _, text in lines if text.startswith(TOLD)]
    run.told += [s.bound_because for s in rig.all(Saved, task, epoch) if s.bound_because]


@functools.cache
def alone(source: str) -> list[str]:
    """Return the lines of a program that nothing disturbs."""
    # without our own variables: OPENBLAS_CORETYPE, for example, gives other bits
    environ = {**sandbox.ENVIRONMENT, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environ["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "p.py").write_text(source)
        with (Path(folder) / "out").open("wb") as out:  # an orphan may keep it open
            subprocess.run(
                [sys.executable, "p.py"],
                cwd=folder,
                env=environ,
                stdout=out,
                check=True,
                timeout=END_S,
            )
        return (Path(folder) / "out").read_text().splitlines()
