"""Waits for inputs of a graph that come late: first with the slot, then without it."""

from __future__ import annotations

import os
import time
from typing import Any

from workers.graph.executor_job import ExecutorJob
from workers.graph.runner import GraphJob
from workers.residents import inbox, orders
from workers.residents.endings import as_ending
from workers.residents.work import Work
from workers.switching import context_switch
from workers.switching import image_file as images

# seconds to wait for a late input before asking for it, as it is usually on its way
UNHEARD_S = 0.1
PUT_AGAIN_S = 1.0  # pause before a failed output is stored again


NOT_LOADED = "An input could not be loaded: "


def image_value(work: Work, fd: int) -> Any:
    """Load the value of an image from `fd`; closes `fd`."""
    try:
        image = images.load(fd)
    finally:
        os.close(fd)
    around, accelerator = work.around, work.accelerator
    return context_switch.value(
        image, around=around, accelerator=accelerator, mapped=may_be_mapped(work)
    )


def may_be_mapped(work: Work) -> bool:
    """True if an input may be mapped from its file instead of copied.

    A function has no images, and a graph hardly writes to its inputs.  With a memory limit the
    inputs of a graph must be copies, which can be released.
    """
    if work.graph is None:
        return work.is_function
    return work.member is None and not (work.graph.memory_bytes or work.spec.devices.memory_bytes)


def await_inputs(work: Work, job: GraphJob) -> None:
    """Wait for the inputs of the graph's next node: first with the slot, then without it.

    Waiting with the slot costs other tasks the device; leaving the slot costs a launch. So the task
    waits for each input about as long as a launch takes, or longer while no other task wants the
    device. It leaves the slot only when all its outputs are durable: other tasks may wait for them,
    and this task is not launched again before its missing input is there.
    """
    awaited, since_s, asked = None, 0.0, False
    while (port := _awaited(work, job)) is not None:
        if awaited != (port, work.seated_s):
            awaited, since_s, asked = (port, work.seated_s), time.monotonic(), False
            work.patience_s = work.start.patience_s
        waited_s = time.monotonic() - since_s
        if waited_s >= UNHEARD_S and not asked:
            work.say("awaits", port=port)
            asked = True
        if waited_s < work.patience_s:
            inbox.listen(work, (work.patience_s if asked else UNHEARD_S) - waited_s)
        elif work.outgoing.busy:
            inbox.listen(work, None)
        elif work.outgoing.unkept:
            inbox.listen(work, PUT_AGAIN_S)
            work.outgoing.put_again()
        else:
            orders.pause(work, lacks=port)
        orders.obey(work)


class FirstExecutor:
    """Handles late inputs and early outputs of a partition, in its first executor.

    The gang waits on its slots for an input as a single executor does (`await_inputs`): for the
    time that a launch takes, or longer while no other task wants the device. The time counts from
    the moment at which no executor can run any more.
    """

    def __init__(self, work: Work, job: ExecutorJob) -> None:
        self.work, self.job = work, job
        self.since_s: float | None = None  # since when the next node has been waiting
        self.still_s: float | None = None  # since when all executors have been waiting
        self.seated_s = work.seated_s  # value of `Work.seated_s` at that time
        self.port = job.lacked()  # the input for which the gang has waited since then
        self.has_asked = self.has_left = False

    @property
    def fd(self) -> int:
        return self.work.wire.fileno()

    def look(self) -> None:
        inbox.listen(self.work, 0)
        if self.work.arrived:
            self.still_s = None  # an executor may run with the new input
        _take_arrived(self.work, self.job)
        self.work.outgoing.give_early()

    def has_news(self) -> bool:
        return self.must_stop() or self.work.wire.wait(0) or self._may_ask() or self._may_leave()

    def must_stop(self) -> bool:
        return self.work.trust.left_us() <= 0

    def waits(self) -> None:
        now = self.work.seated_s, self.job.lacked()
        if self.since_s is None or (self.seated_s, self.port) != now:
            self.since_s, self.work.patience_s = time.monotonic(), self.work.start.patience_s
            self.seated_s, self.port = now
            self.still_s, self.has_asked, self.has_left = None, False, False
        if self._may_ask():
            self.work.say("awaits", port=self.job.lacked())
            self.has_asked = True
        if not self._may_leave():
            return
        if self.work.outgoing.unkept:
            self.still_s = time.monotonic() - self.work.patience_s + PUT_AGAIN_S
            self.work.outgoing.put_again()
        else:
            self.work.say("lacks", port=self.job.lacked())
            self.has_left = True

    def runs(self) -> None:
        self.since_s = self.still_s = None

    def _may_ask(self) -> bool:
        return not self.has_asked and bool(self.job.lacks) and _seconds(self.since_s) >= UNHEARD_S

    def _may_leave(self) -> bool:
        """True if the gang has waited long enough, and all its outputs are stored or have
        failed.
        """
        if self.has_left or not self.job.lacks or self.since_s is None:
            return False
        if not self.job.stands_still:
            self.still_s = None
            return False
        self.still_s = self.still_s or time.monotonic()
        # Once all executors stand still, none of them makes an output. So the outputs are checked
        # only then.
        return _seconds(self.still_s) >= self.work.patience_s and not (
            self.work.outgoing.busy or self.job.has_new_outputs
        )


def _seconds(since_s: float | None) -> float:
    return 0.0 if since_s is None else time.monotonic() - since_s


def _awaited(work: Work, job: GraphJob) -> str | None:
    """Take in the inputs that have arrived; return the port for which the next node waits, if
    any.
    """
    let_lie(work, job)
    _take_arrived(work, job)
    return job.awaited()


def _take_arrived(work: Work, job: GraphJob) -> None:
    try:
        for port in list(work.arrived):
            fd = work.arrived.pop(port)
            if port not in job.lacks.values():  # the input came before the gang was forked anew
                os.close(fd)
                continue
            job.take(port, image_value(work, fd))
            work.images.lies = None  # the image lacks the new input
    except BaseException as error:
        raise as_ending(error, begun=NOT_LOADED) from error


def let_lie(work: Work, job: GraphJob) -> None:
    """Map outputs from their stored files, so that the memory in which they were made can be
    reused.

    A part of a graph holds all its outputs until its end, and would otherwise need new memory for
    each.
    """
    outgoing = work.outgoing
    for name, fd in outgoing.lie.items():
        if not may_be_mapped(work):
            os.close(fd)
            continue
        value = image_value(work, fd)
        outgoing.values |= dict.fromkeys(job.let_lie(name, value), value)
        work.images.lies = None  # outdated
    outgoing.lie.clear()
