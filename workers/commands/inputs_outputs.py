"""Gives a command its inputs as files, and reads its outputs and its progress.

Inputs lie in the folder ROUNDHOUSE_INPUTS:
* PORT: the bytes of a file that another command made;
* PORT.pt: a value from a job or a function, for `torch.load`;
* PORT.safetensors or PORT.npy: a datablock, or an output published as one;
* PORT: a datablock that is a folder, read-only.

An output NAME is the file NAME, or NAME with any extension, in the working folder; a task that
takes it as an input gets its bytes.  A published output is safetensors or npy.  Other files that
are kept are artifacts (`workers.commands.results`).  Progress is lines of JSON, each an object,
written to ROUNDHOUSE_METRICS.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.core.model.checkpoints import tensor_file
from app.core.model.checkpoints.tensor_file import HEAD_BYTES, BadTensorFile
from app.core.model.metric_rows import MetricRows
from app.core.model.provisions.best_rule import BestRule
from app.core.model.provisions.folder import FOLDER
from app.core.model.provisions.resources import DISK, exceeded
from workers.capture.capture import Surroundings
from workers.commands.results import opened
from workers.hardware.accelerator import Accelerator
from workers.process.isolation.sandbox import INPUTS
from workers.process.task_start import InputFile
from workers.residents.endings import Ending
from workers.residents.entry import metrics_of
from workers.switching import context_switch
from workers.switching import image_file as images
from workers.switching.image_file import Image

JSON = dict[str, Any]

LINE_LIMIT_BYTES = 64 * 1024
MOST_STEPS = 2**53  # floats are exact below
REMEMBERED_METRICS = 1000
_PIECE = 1 << 20


# --- inputs ---------------------------------------------------------------------------------------


def bring_in(inputs: Mapping[str, InputFile], take: Callable[[], int], folder: Path) -> None:
    """Write the inputs into the new `folder`; `take` returns the open file of the next input.
    Raises Ending.
    """
    folder.mkdir()
    for port, source in sorted(inputs.items()):
        fd = take()
        try:
            if source.format == FOLDER:
                (folder / port).symlink_to(INPUTS / port)
            elif source.format:
                _copy(fd, folder / f"{port}.{source.format}")
            else:
                _unpickle(images.load(fd), port, folder)
        finally:
            os.close(fd)


def _copy(fd: int, path: Path) -> None:
    """Copy a file, so that what the command writes to it reaches no other task."""
    with os.fdopen(os.dup(fd), "rb") as file, path.open("xb") as copy:
        shutil.copyfileobj(file, copy, _PIECE)


def _unpickle(image: Image, port: str, folder: Path) -> None:
    """Unpickle an image and write its value, in a child process, because unpickling runs tenant
    code.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    if not (child := os.fork()):
        os.close(read)
        _lay_down(image, folder / port, write)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        wrong = said.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    if status:
        last = wrong.strip().rpartition("\n")[2] or f"its process ended with {status}"
        told = f"The input {port!r} could not be loaded: {last}"
        raise Ending("failed", cause="exception", message=told[:2000], detail=wrong[-60_000:])


def _lay_down(image: Image, path: Path, write: int) -> None:
    status = 1
    os.closerange(3, write)  # closes our sockets
    os.closerange(write + 1, 1 << 16)
    try:
        value = context_switch.value(image, around=Surroundings(), accelerator=Accelerator("cpu"))
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            import torch

            torch.save(value, path.with_name(f"{path.name}.pt"))
        status = 0
    except BaseException:
        os.write(write, traceback.format_exc().encode()[-60_000:])
    finally:
        os._exit(status)


# --- outputs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class File:
    """A file in the working folder, unchanged."""

    path: Path
    size_bytes: int

    def pieces(self) -> Iterator[bytes]:
        with opened(self.path) as file:
            while piece := file.read(_PIECE):
                yield piece


def output_of(name: str, folder: Path, *, step: int, publish: bool) -> Image | File:
    """Return the output of this name from the working folder; raises Ending."""
    found = [path for path in folder.iterdir() if _is_called(path, name)]
    if len(found) != 1:
        there = ", ".join(sorted(path.name for path in found)) or "none"
        told = (
            f"the output {name!r} is the file {name} or {name}.* in the working folder, and"
            f" exactly one is wanted; there is: {there}"
        )
        raise Ending("failed", cause="exception", message=told, detail="")
    try:
        if publish:
            return _tensors(found[0])
        with opened(found[0]) as file:
            body = file.read()
    except OSError as error:
        told = f"the output {name!r} cannot be read: {error}"
        raise Ending("failed", cause="exception", message=told, detail="") from error
    around, accelerator = Surroundings(), Accelerator("cpu")
    return context_switch.stage(body, step=step, around=around, accelerator=accelerator, root=name)


def _tensors(path: Path) -> File:
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            tensor_file.read(file.read(HEAD_BYTES), size)
        except BadTensorFile as error:
            told = f"{path.name} is to be published, but is not a safetensors or npy file: {error}"
            raise Ending("failed", cause="exception", message=told, detail="") from error
    return File(path, size)


def _is_called(path: Path, name: str) -> bool:
    return path.name == name or (path.name.startswith(f"{name}.") and path.is_file())


# --- progress -------------------------------------------------------------------------------------


@dataclass(slots=True)
class OwnSteps:
    """Gives rows a place by the `step` that a command writes; a later row never replaces a value.

    A command whose step restarts, each epoch for example, would write to the places of its earlier
    rows. From such a row on, all places are moved behind the last one.
    """

    step: int | None = None
    moved: int = 0
    highest: int = 0  # step since the places were moved last
    newest: dict[str, int] = field(default_factory=dict)  # metric -> its last step since then

    def place(self, metrics: JSON, counted: int) -> int:
        """Return the place of a row, which is the `counted`-th if the command writes no steps."""
        own = metrics.get("step")
        if isinstance(own, float) and own.is_integer():
            own = int(own)
        if type(own) is int and 0 <= own < MOST_STEPS:
            self.step = own
        if (step := self.step) is None:
            return counted
        names = [name for name in metrics if name != "step"]
        if any(self.newest.get(name, -1) >= step for name in names):
            self._move(step)
        for name in names:
            self.newest.pop(name, None)
            self.newest[name] = step
            if len(self.newest) > REMEMBERED_METRICS:
                del self.newest[next(iter(self.newest))]
        self.highest = max(self.highest, step)
        return self.moved + step

    def _move(self, step: int) -> None:
        self.moved += self.highest + 1 - step
        if self.moved + step >= MOST_STEPS:
            self.moved = 0
        self.highest, self.newest = step, {}


class Progress:
    """Reads a named pipe to which the command writes lines: `rows` has those not reported yet, and
    `metrics` is the content of the last line.

    The step of a row is its own `step`, if the command writes such a number (`OwnSteps`), else its
    place among the lines. `ranked` is the last value of the metric of `best` (`BestRule.ranked`).
    """

    def __init__(
        self, path: Path, complain: Callable[[str], None], best: BestRule | None = None
    ) -> None:
        os.mkfifo(path, 0o600)
        # O_RDWR, so that reads never see the end of file
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.metrics: JSON = {}
        self.rows = MetricRows()
        self.is_new = False
        self.steps = OwnSteps()
        self._rest = b""
        self._complain, self._has_complained = complain, False
        self._best, self.ranked = best, JSON()

    def read(self, step: int) -> int:
        """Read what was written after this step; return the number of lines of progress."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self.fd, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return self._take(lines, step)

    def read_all(self, step: int) -> int:
        """Read all that an ended command wrote, also a line without its end."""
        number = 0
        while select.select([self.fd], [], [], 0)[0]:
            number += self.read(step + number)
        rest, self._rest = self._rest, b""
        return number + self._take([rest], step + number)

    def _take(self, lines: list[bytes], step: int) -> int:
        good = [said for line in lines if line.strip() and (said := self._parsed(line)) is not None]
        for number, metrics in enumerate(good, 1):
            place = self.steps.place(metrics, step + number)
            self.rows.add(place, metrics)
            if self._best is not None:
                self.ranked = self._best.ranked(place, metrics) or self.ranked
            self.metrics, self.is_new = metrics, True
        return len(good)

    def _parsed(self, line: bytes) -> JSON | None:
        try:
            body = json.loads(line)
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict):
            return metrics_of(body)
        if not self._has_complained:
            self._has_complained = True
            told = f"a line in ROUNDHOUSE_METRICS must be a JSON object; got {line[:100]!r}"
            self._complain(f"{told}; such lines are ignored")
        return None


def full_disk(folder: Path, most: int) -> str:
    """Return a message if the task's folder is over its limit of `most` bytes of disk; else ""."""
    disk = os.statvfs(folder)
    used, files = (disk.f_blocks - disk.f_bfree) * disk.f_frsize, disk.f_files - disk.f_ffree
    if most and (used >= most or not disk.f_bavail):
        return exceeded(DISK, used, most)
    if most and not disk.f_ffree:
        return f"It made {files:,} files, as many as its disk takes (resources.disk_bytes)."
    return ""
