"""Makes images of a job: stages them into the slab, and tells the supervisor."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from workers.capture.capture import Captured, Surroundings, capture
from workers.graph.runner import GraphJob
from workers.hardware import preset
from workers.hardware.accelerator import Accelerator
from workers.hardware.dirty_pages import Watch
from workers.process import slab as slabs
from workers.process.image_layout import Layout
from workers.process.slab import Slab
from workers.residents.endings import JSON, Abandoned, told_as_ending
from workers.switching.offload import Absence
from workers.switching.staging import Staging

# seconds from the last image to the image of a pause, at least; a requested image comes sooner
SAVES_APART_S = 1.0


@dataclass(frozen=True, slots=True)
class Lies:
    """Describes the image in the slab, or on its way there: the state of a job off its slot."""

    step: int
    fingerprint: JSON
    captured: Captured
    layout: Layout
    lacks: list[str]  # late inputs that the graph had not used yet
    ranked: JSON  # the value that ranks it among the task's checkpoints (`Work.ranked`)
    round: int = 0

    def index(self) -> JSON:
        layout, tensors = self.layout.as_json(), self.captured.tensors
        return {"layout": layout, "fingerprint": self.fingerprint, "tensors": tensors}


class NextOutput(Protocol):
    def next(self) -> None:
        """Send the next output, now that no image is leaving."""


class ImagedTask(Protocol):
    """Says what images read and call of their task, which is `work.Work`."""

    slab: Slab
    watch: Watch | None
    accelerator: Accelerator
    around: Surroundings
    job: Any
    step: int
    ranked: JSON

    @property
    def state(self) -> Any: ...

    @property
    def is_rank(self) -> bool: ...

    @property
    def outgoing(self) -> NextOutput: ...

    def say(self, word: str, **said: Any) -> None: ...


class Images:
    """Makes the job's images, one at a time: stages each into the slab and tells the supervisor.

    While the job is off its slot, an image may be staged without a report, only because other tasks
    want the device memory.
    """

    def __init__(self, work: ImagedTask) -> None:
        self.work, self.staging = work, Staging(work.slab, work.watch, work.accelerator)
        self.absence = Absence(work.slab, work.accelerator, self.staging.pinned)
        self.lies: Lies | None = None  # True while no step runs
        self.busy = False  # an image is in the slab or on its way there
        self.failed = False  # the last image was not stored; the supervisor says when to retry
        self.last_step: int | None = None  # step of the newest image that is stored or on its way
        self.left_s = -math.inf  # when the newest image left
        self.round = 0  # number of the gang's image; all ranks cancel it together

    def put(self) -> None:
        """Make an image of the last finished step and have it stored; raises Ending."""
        self.failed = False
        if self.lies_there:
            self._is_leaving()
            self._tell(replace(cast(Lies, self.lies), round=self.round))
            return
        with told_as_ending():
            captured = self._captured()
            lies = partial(
                Lies,
                self.work.step,
                preset.fingerprint(self.work.accelerator),
                captured,
                lacks=self._lacks(),
                ranked=self.work.ranked,
            )
            self._is_leaving()
            told = partial(lies, round=self.round)
            layout = self.staging.begin(captured, lambda layout: self._tell(told(layout)))
        self.lies = lies(layout)

    def _captured(self) -> Captured:
        work = self.work
        work.accelerator.synchronize()
        return capture(work.state, around=work.around, accelerator=work.accelerator)

    def _lacks(self) -> list[str]:
        job = self.work.job
        return list(job.lacks.values()) if isinstance(job, GraphJob) else []

    def _is_leaving(self) -> None:
        self.busy, self.last_step, self.left_s = True, self.work.step, time.monotonic()

    @property
    def lies_there(self) -> bool:
        """True if the slab holds the complete state of this step."""
        here = self.lies is not None and self.lies.step == self.work.step
        return here and not self.staging.is_copying and not self.staging.spoiled

    def may_leave(self) -> bool:
        """True if the slab is free, or holds the image of this step.

        If not, an older image in the slab is still being stored.
        """
        self.staging.join()
        self.look()
        return self.lies_there or not self.busy

    def leave(self, freed: Callable[[], None]) -> None:
        """Release device memory while the job is off its slot; raises Ending. Call it only if
        `may_leave`.
        """
        if self.lies_there:
            lies = cast(Lies, self.lies)
            lying = zip(lies.captured.storages, lies.layout.storages, strict=True)
            self.absence.leave(lying, freed)
            return
        with told_as_ending():
            captured = self._captured()
            layout, brought = self.staging.bring(captured)
        self.absence.leave(brought, freed)
        self.lies = Lies(
            self.work.step,
            preset.fingerprint(self.work.accelerator),
            captured,
            layout,
            lacks=self._lacks(),
            ranked=self.work.ranked,
        )

    def come_back(self, room: Callable[[int], None]) -> None:
        self.staging.lies(self.absence.come_back(room))

    def settle(self) -> bool:
        """Finish staging between two steps; False if the image was spoiled."""
        self.staging.join()
        return not self._is_spoiled()

    def kept(self, message: JSON) -> None:
        self.busy = False
        if message.get("error"):
            self.last_step, self.failed = None, True
        self.work.outgoing.next()

    def call_off(self, round: int) -> None:
        """Cancel this rank's image, as not all ranks have made theirs."""
        self.round = round
        if self.busy:
            self.busy, self.last_step = False, None
            self.work.outgoing.next()

    def wait(self, for_s: float) -> None:
        """Delay the image of a pause, to leave the cores to other tasks.

        An order to save is obeyed at once.
        """
        self.left_s = max(self.left_s, time.monotonic() + for_s - SAVES_APART_S)

    def look(self) -> None:
        """Check, while the job is off its slot, whether a process of the job has spoiled the
        image.
        """
        if not self.staging.is_copying and self._is_spoiled():
            self.left_s = time.monotonic()  # retry soon, but not in a tight loop

    def _is_spoiled(self) -> bool:
        spoiled, self.staging.spoiled = self.staging.spoiled, False
        if spoiled:
            self.busy, self.last_step = False, None
            # if the memory is off the device, only the report failed
            self.lies = self.lies if self.absence.away else None
            self.work.outgoing.next()
        return spoiled

    def _tell(self, lies: Lies) -> None:
        """Write the index and report the image. Runs in the thread that copied the image's last
        byte.

        The slab belongs to the supervisor until the image is stored.
        """
        about: JSON = {"at_step": lies.step, "round": lies.round}
        if lies.ranked:
            about["ranked"] = lies.ranked
        if self.work.is_rank:
            about["lacks"] = lies.lacks
        index = lies.index()
        try:
            size = self.work.slab.write_index(index)
            self.work.say("saving", what="image", **about, index_bytes=size)
        except Abandoned:
            pass  # the main thread will notice
        except (OSError, slabs.BadIndex):
            traceback.print_exc()  # printed into the job's log; the next image is a new try
            self.staging.spoiled = True
