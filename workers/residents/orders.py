"""Obeys orders at a safe point: pauses, saves, stops, leaves the slot and returns to it."""

from __future__ import annotations

import time

from workers.residents import inbox, progress
from workers.residents.endings import Ending
from workers.residents.images import SAVES_APART_S
from workers.residents.progress import REPORT_S
from workers.residents.work import Work
from workers.switching.offload import CalledOff

# seconds by which the image of a pause is delayed, so that the next task can take the slot
AFTER_PAUSING_S = 0.02
AFTER_LEAVING_S = 0.25  # delay of the image after releasing memory for another task
TOLD_BYTES = 16 * 2**20  # report at least this many bytes of released device memory at once
LOOK_S = 0.05  # interval of checks off the slot whether a copy is complete


def obey(work: Work) -> None:
    inbox.listen(work, 0)
    if not work.images.settle():
        _save_again(work)
    while True:
        if "cancel" in work.wishes:
            raise Ending("stopped")
        if "pause" in work.wishes:
            pause(work)
        elif work.trust.left_us() <= 0:
            _stand_still(work)
        else:
            break
    _save_if_wished(work)


def _save_again(work: Work) -> None:
    """Request another image, because this one was spoiled.

    In a gang all ranks make it after the same step.
    """
    if work.member is None:
        work.wishes.add("save")
    else:
        work.say("spoiled")


def pause(work: Work, **told: str) -> None:
    """Leave the slot. The process keeps its state; its image can be made while another task runs.

    A task that only yields its slot soon gets it back: meanwhile it makes only images that were
    requested, and does not report more often than it would otherwise.
    """
    work.is_back_soon = "yield" in work.wishes
    work.wishes -= {"pause", "yield"}
    if work.is_back_soon:
        work.accelerator.synchronize()  # device work that the task began is part of its slice
    if not work.is_back_soon or time.monotonic() - work.reported_s >= REPORT_S:
        progress.report_all(work)
    if work.member is not None:  # if the gang changes its hosts, this process ends here
        work.outgoing.hold()  # the conductor waits for outputs that are leaving
    has_state = work.job is not None or work.ctx.result is not None
    work.say("paused", has_state=has_state, **told)
    work.images.wait(AFTER_PAUSING_S)
    saved_s = work.saved_s
    wait_for_seat(work)
    work.outgoing.go_on()
    if not work.is_back_soon:
        work.seated_s = time.monotonic()
    work.saved_s = saved_s if work.is_back_soon else work.seated_s
    work.is_back_soon = False
    if work.ending is not None:
        raise work.ending


def wait_for_seat(work: Work) -> None:
    """Wait without the slot: orders are answered, but no step runs.

    The image of the pause is sent at once, or SAVES_APART_S after the previous image: a task with
    many slices a second does not write an image for each.
    """
    while "go" not in work.wishes or work.images.absence.away:
        if "cancel" in work.wishes:
            raise Ending("stopped")
        if "go" in work.wishes:  # the supervisor no longer waits for the release, which did happen
            work.granted_bytes = work.images.absence.bytes
            _return(work)
            continue
        if "pause" in work.wishes:  # the return is called off: the co-located tasks stay longer
            work.wishes -= {"pause"}
            work.is_back_soon = False
        wait_s = _save_in_s(work)
        if "return" in work.wishes:
            _return(work)
        elif "leave" in work.wishes and work.images.may_leave():
            _leave(work)
        elif wait_s is not None and wait_s <= 0:
            _save_off_the_seat(work)
        else:
            inbox.listen(work, wait_s)
            work.images.look()
    work.wishes -= {"go"}


def _leave(work: Work) -> None:
    """Release device memory; report the released bytes step by step."""
    work.wishes -= {"leave"}
    images, told_bytes = work.images, 0
    work.outgoing.spare.let_go()
    absent = images.absence
    if not absent.away:
        work.before_bytes = progress.memory_bytes(work)

    def freed() -> None:
        nonlocal told_bytes
        if absent.bytes >= told_bytes + TOLD_BYTES:
            told_bytes = absent.bytes
            _say_away(work, settled=False)

    try:
        if work.job is not None and work.ending is None:
            images.leave(freed)
    except Ending as ending:
        work.ending = ending
    _say_away(work)
    # First the task that waits for this memory gets it; then the image goes to the store.
    images.wait(AFTER_LEAVING_S)


def _return(work: Work) -> None:
    """Take device memory again, as far as it is granted."""
    work.wishes -= {"return", "leave"}

    def room(size: int) -> None:
        while work.granted_bytes < size:
            if work.wishes & {"leave", "cancel"}:
                raise CalledOff
            inbox.listen(work, None)
        work.granted_bytes -= size

    work.images.come_back(room)
    work.granted_bytes = 0
    work.wishes -= {"return"}
    if not work.images.absence.away and work.accelerator.is_host:
        # Malloc took new memory; the kernel may reclaim the old memory.
        grown_bytes = progress.memory_bytes(work) + work.lazy_bytes - work.before_bytes
        work.lazy_bytes = max(0, grown_bytes)
    if "leave" not in work.wishes:  # otherwise the report follows the release
        _say_away(work)


def _say_away(work: Work, *, settled: bool = True) -> None:
    away_bytes = work.images.absence.bytes
    memory_bytes = progress.memory_bytes(work) if settled else 0
    said = {"bytes": away_bytes, "settled": settled, "memory_bytes": memory_bytes}
    work.say("away", turn=work.turn, **said)


def _save_in_s(work: Work) -> float | None:
    """Return the seconds until the image of the pause is sent; None if there is nothing to wait
    for.
    """
    images = work.images
    if images.staging.is_copying:
        return LOOK_S
    if images.busy or work.outgoing.is_sending:
        return None  # only one storage leaves at a time; a message reports its end
    if work.job is None or work.ending or images.last_step == work.step:
        return None
    if work.member is not None and work.ctx.result is not None:
        return None  # other ranks have ended, so no image of the gang can be made
    if "save" in work.wishes:
        return 0.0
    if work.is_back_soon:
        return None
    return None if images.failed else images.left_s + SAVES_APART_S - time.monotonic()


def _save_off_the_seat(work: Work) -> None:
    work.wishes -= {"save"}
    try:
        work.images.put()
    except Ending as ending:
        # a task ends only in the slot, so the end is reported when the task has the slot again
        work.ending = ending
        if work.member is not None:
            work.say("unsaved")


def _stand_still(work: Work) -> None:
    """Wait until the device's trust is renewed, or for an order."""
    with work.away("trust in its device"):
        work.say("still")
        while work.trust.left_us() <= 0 and not work.wishes & {"cancel", "pause"}:
            inbox.listen(work, 0.25)
        work.say("moving")


def _save_if_wished(work: Work) -> None:
    every_s = work.spec.checkpoint.every_s
    due = every_s > 0 and time.monotonic() - work.saved_s >= every_s
    if not (due or "save" in work.wishes) or work.images.busy or work.job is None:
        return
    if work.member is not None:
        _let_outputs_leave(work)
    elif work.outgoing.busy:
        return
    work.wishes -= {"save"}
    work.saved_s = time.monotonic()
    if work.images.last_step != work.step:
        began_s = time.perf_counter()
        work.images.put()
        work.staged_s += time.perf_counter() - began_s
    if work.member is not None:
        work.outgoing.go_on()


def _let_outputs_leave(work: Work) -> None:
    """Wait until the outputs that are being sent are stored, and send no more before the image.

    All ranks make their parts of an image at the cut; a rank that sent outputs first would be late.
    """
    work.outgoing.hold()
    while work.outgoing.is_sending:
        inbox.listen(work, None)
