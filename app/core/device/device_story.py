"""Tells a device's events and instructions in the words of its story (`core.model.story`).

A line names types, states, reasons and numbers. It leaves out what a tenant may have written:
messages, parameters and details of reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.core.device.device_events import (
    ContinueProcess,
    DeviceEvent,
    DropAsked,
    DropStay,
    ExpectHosts,
    FetchInputs,
    ForgetHosts,
    ForgetStay,
    GiveNotice,
    GiveSlot,
    Instruction,
    KillAsked,
    KillProcess,
    OrderCame,
    ProcessConcluded,
    ProcessEvent,
    ProcessPaused,
    ProcessPrepared,
    ProcessProgressed,
    ProcessStood,
    SendWord,
    StayKey,
    TaskUnable,
    TellIsland,
    TellSaved,
    TellVerdict,
)
from app.core.device.device_records import ProcessRecord, StayRecord
from app.core.model.story import Story

#: By event: the field that its line shows.
_SHOWN = {
    DropAsked: "reason",
    KillAsked: "reason",
    ProcessConcluded: "word",
    ProcessPaused: "step",
    ProcessPrepared: "step",
    ProcessStood: "is_still",
    TaskUnable: "cause",
}
#: By instruction about a stay or a process: the field that names it, and the field that is shown.
#: Other instructions say nothing of a task that its event does not say.
_ABOUT: dict[type[Instruction], tuple[str, str]] = {
    ContinueProcess: ("stay", "process"),
    DropStay: ("stay", ""),
    ExpectHosts: ("stay", ""),
    FetchInputs: ("stay", ""),
    ForgetHosts: ("stay", ""),
    ForgetStay: ("stay", ""),
    GiveNotice: ("process", "why"),
    GiveSlot: ("process", "process"),
    KillProcess: ("process", "reason"),
    SendWord: ("process", "word"),
    TellIsland: ("stay", "kind"),
    TellSaved: ("process", ""),
    TellVerdict: ("process", ""),
}


class DeviceStory(Story):
    """Notes what came to a device and what it did about that, in a line for each task."""

    __slots__ = ("_processes", "_stays")

    def __init__(
        self, stays: Mapping[StayKey, StayRecord], processes: Mapping[int, ProcessRecord]
    ) -> None:
        super().__init__()
        self._stays, self._processes = stays, processes

    def stay_of(self, event: DeviceEvent) -> StayKey | None:
        """Return the stay that the event is about, if any; the event must not be handled yet."""
        if isinstance(event, ProcessEvent):
            return self._processes[event.process].stay.key
        if isinstance(event, OrderCame):
            return event.order.task, event.order.epoch
        return getattr(event, "stay", None)

    def tell(
        self, event: DeviceEvent, about: StayKey | None, out: Sequence[Instruction], now_us: int
    ) -> None:
        """Note a handled event for the stay that it is `about`, and its instructions by stay.

        Progress and what comes in each round are noted only where they have an effect.
        """
        is_told = about is not None and type(event) is not ProcessProgressed
        if not (is_told or out):
            return
        done: dict[StayKey | None, list[object]] = {about: []} if is_told else {}
        for instruction in out:
            fields = _ABOUT.get(type(instruction))
            if fields is not None:
                key = self._key(getattr(instruction, fields[0]), about)
                done.setdefault(key, []).append(_word(instruction, fields[1]))
        for key, words in done.items():
            if key is not None:
                stay = self._stays.get(key)
                state = "forgotten" if stay is None else stay.state
                what = event.order if isinstance(event, OrderCame) else event
                word = _word(what, _SHOWN.get(type(event), ""))
                self.note(now_us, key[0], key[1], word, state, *words)

    def _key(self, subject: StayKey | int, about: StayKey | None) -> StayKey | None:
        """Return the stay that an instruction is about; an exited process is that of the event."""
        if isinstance(subject, tuple):
            return subject
        process = self._processes.get(subject)
        return about if process is None else process.stay.key


def _word(what: object, shown: str) -> object:
    """Return the name of an event or instruction, with the value that is shown, if any.

    Values become text when the story is read, as most stories are never read.
    """
    return (type(what), getattr(what, shown)) if shown else type(what)
