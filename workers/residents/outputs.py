"""Send a task's outputs to the store, while the task goes on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from app.core.model.descriptor import TaskDescriptor
from workers.capture.capture import Surroundings, Uncapturable
from workers.capture.tensor_io import Published, Unpublishable
from workers.graph.executor_job import ExecutorJob
from workers.hardware.accelerator import Accelerator
from workers.residents.context import Context
from workers.residents.endings import JSON, Abandoned, Ending, uncapturable
from workers.residents.shared_process import WRITER
from workers.switching import context_switch
from workers.switching.context_switch import Spare
from workers.switching.image_file import Image

Memory = list[torch.UntypedStorage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Describes an output to store.

    Its `memory` is needed until it is stored. `early` is True if it was made before the task's end.
    """

    what: str
    body: Image | Published
    memory: Memory
    early: bool

    def said(self) -> JSON:
        sizes = {"size_bytes": self.body.size_bytes, "head_bytes": self.body.head_bytes}
        return {"what": self.what, "early": self.early, **sizes}


class LeavingImage(Protocol):
    busy: bool  # an image is in the slab or on its way there


class SendingTask(Protocol):
    """Says what outputs read and call of their task, which is `work.Work`."""

    bulk: socket.socket
    accelerator: Accelerator
    around: Surroundings
    ctx: Context
    job: Any
    step: int

    @property
    def spec(self) -> TaskDescriptor: ...

    @property
    def is_rank(self) -> bool: ...

    @property
    def images(self) -> LeavingImage: ...

    def say(self, word: str, **said: Any) -> None: ...


class Outgoing:
    """Sends outputs to the store, one after the other; `settled` has the answers.

    `values` are all outputs that were put; a graph puts some while it runs. `leaving` are sent and
    not stored yet. A thread writes them one after the other. It does not wait for safe points,
    because other tasks may wait for each output. No image is sent at the same time.
    """

    def __init__(self, work: SendingTask) -> None:
        self.work = work
        self.waiting, self.leaving = deque[Output](), dict[str, Output]()
        self.spare = Spare()
        self.values: JSON = {}
        self.settled: dict[str, JSON] = {}
        self.lie: dict[str, int] = {}  # stored outputs, as files of this host
        self.is_held = False
        self._writes, self._lock = False, threading.Lock()

    def put(self, value: object, name: str) -> None:
        """Store an output, unless it is already stored or on its way; raises Ending."""
        if name in self.values and self.values[name] is value and name not in self.unkept:
            return
        self.values[name] = value
        self._put(value, name)

    def _put(self, value: object, name: str) -> None:
        memory = Memory()

        def new(size: int) -> torch.UntypedStorage:
            memory.append(self.spare.take(size))
            return memory[-1]

        output = Output(
            what=f"output:{name}",
            body=_output(self.work, value, name, new),
            memory=memory,
            early=self.work.ctx.result is None,  # otherwise the final message names all outputs
        )
        self.waiting.append(output)
        self.next()

    def give_early(self) -> None:
        """Store the outputs of a graph as soon as they are made.

        Another task that waits for several outputs starts when the last of them is stored.
        """
        for name, value in self.work.job.made().items():
            if name in self.work.spec.outputs:
                self.put(value, name)

    def kept(self, message: JSON, files: list[int]) -> None:
        output = self.leaving.pop(message["what"])
        if not message.get("error"):
            self.spare.give_back(output.memory)
        self.settled[message["what"]] = message
        self.lie.update((message["what"].partition(":")[2], fd) for fd in files)
        self.next()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.leaving)

    @property
    def is_sending(self) -> bool:
        """True if an output is leaving, or will leave without further calls."""
        return bool(self.leaving) or (bool(self.waiting) and not self.is_held)

    @property
    def unkept(self) -> list[str]:
        """The outputs that could not be stored."""
        settled = (name for name in self.values if f"output:{name}" in self.settled)
        return [name for name in settled if self.settled[f"output:{name}"].get("error")]

    def put_again(self) -> None:
        """Store the failed outputs again; raises Ending."""
        for name in self.unkept:
            del self.settled[f"output:{name}"]
            self._put(self.values[name], name)

    def hold(self) -> None:
        """Send no more outputs.

        The supervisor knows of all outputs whose sending has begun.
        """
        with self._lock:
            self.is_held = True

    def go_on(self) -> None:
        self.is_held = False
        self.next()

    def next(self) -> None:
        """Start to send the waiting outputs, unless an image is leaving."""
        with self._lock:
            if self._writes or not self._may_leave():
                return
            self._writes = True
        threading.Thread(target=self._write_all, name=WRITER, daemon=True).start()

    def _may_leave(self) -> bool:
        """True if the next output may be sent; in a gang only after the previous one is stored."""
        if not self.waiting or self.is_held:
            return False  # the task may be over by now
        return not (self.work.images.busy or (self.work.is_rank and self.leaving))

    def _write_all(self) -> None:
        with contextlib.suppress(Abandoned):  # the main thread will notice
            while (output := self._begun()) is not None:
                _write(self.work.bulk, output.body)

    def _begun(self) -> Output | None:
        """Begin to send the next output, if it may leave."""
        with self._lock:
            self._writes = self._may_leave()
            if not self._writes:
                return None
            output = self.waiting[0]
            # add it first, so that the output is always in one of the two
            self.leaving[output.what] = output
            self.waiting.popleft()
            self.work.say("saving", at_step=self.work.step, **output.said())
            return output


def _write(bulk: socket.socket, body: Image | Published) -> None:
    with contextlib.suppress(OSError):  # the reader is gone; the main thread will notice
        for piece in body.pieces():
            bulk.sendall(piece)


def _output(
    work: SendingTask, value: object, root: str, new: Callable[[int], torch.UntypedStorage]
) -> Image | Published:
    try:
        if root in work.spec.publish:
            return Published(value, f"result[{root!r}]")
        around, accelerator = work.around, work.accelerator
        # How far an executor is when an output arrives depends on the other executors: so no step
        # is stored.
        step = 0 if isinstance(work.job, ExecutorJob) else work.step
        return context_switch.stage(
            value, step=step, around=around, accelerator=accelerator, root=root, new=new
        )
    except Unpublishable as error:
        raise Ending("failed", cause="exception", message=str(error), detail="") from error
    except Uncapturable as error:
        raise uncapturable(error) from error
