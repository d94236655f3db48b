"""Decides how a task ended: by its process's final message, or by the way the process died."""

from __future__ import annotations

from typing import Any

from app.core.device.device_machine import PREPARE_US
from app.core.model.protocol import messages
from app.log_patterns import matched_lines
from workers.device.host.resource_watch import EXCEEDED
from workers.device.processes import resident as residents
from workers.device.processes.resident import Resident
from workers.process.exit_status import shell_status
from workers.process.isolation.sandbox import CANNOT_START

JSON = dict[str, Any]


def last_word(resident: Resident, *, was_stopping: bool) -> JSON:
    """Return the final event of a stay from the process's final message and the way it ended."""
    said = _event(resident, was_stopping=was_stopping)
    if said["is"] is not messages.Failed:
        return said
    log = resident.stay.log.recent
    told = [*log, *said.get("detail", "").splitlines(), *said["message"].splitlines()]
    return {**said, "matched": matched_lines(resident.stay.spec.retry, told)}


def _event(resident: Resident, *, was_stopping: bool) -> JSON:
    said, kill_reason = resident.verdict, resident.kill_reason or resident.record.stop_reason
    if said is not None and said["is"] is messages.Finished:
        dropped = {"dropped": resident.dropped} if resident.dropped else {}
        return {**said, "outputs": resident.outputs, **dropped}
    if kill_reason == "cancel" or was_stopping:
        return {"is": messages.Stopped, **resident.left}
    if said is not None and not kill_reason:
        return _own_word(resident, said)
    if resident.exit_status == CANNOT_START and not kill_reason and not _has_run(resident):
        return {"is": messages.Failed, "cause": "device", "message": _FAULT}
    cause = _CAUSES.get(kill_reason, "memory" if resident.lacked_memory else "exit")
    told = f"{resident.refused} It was ended."
    if kill_reason != EXCEEDED:
        told = _how_it_ended(kill_reason, resident.exit_status or 0, resident.refused)
    if kill_reason == "max_duration" and resident.stay.behind:
        told = f"{told} {resident.stay.behind}"
    if kill_reason == "device_memory":
        told = _beyond_its_memory(resident)
    last = "\n".join(resident.stay.log.last)
    failed = {"is": messages.Failed, "cause": cause, "message": told, "detail": last}
    if resident.exit_status is not None and not kill_reason:  # else it is that of our signal
        failed["exit_status"] = shell_status(resident.exit_status)
    return {**failed, **resident.left}


#: The reason why a process was killed -> the cause of its task's failure; all others are "exit".
_CAUSES = {
    "max_duration": "max_duration",
    "slow": "bundle",
    EXCEEDED: "memory",
    "device_memory": "device_memory",
}


def _own_word(resident: Resident, said: JSON) -> JSON:
    """Return the event for the final message of a process that was not killed."""
    if said["is"] is not messages.Failed:
        return said
    if resident.refused:
        said = {**said, "message": f"{resident.refused} {said['message']}"}
    if said["cause"] == "again":
        if resident.stay.spec.notice is not None:
            return {**said, **resident.left, "noticed": resident.stay.record.noticed}
        said = {**said, "cause": "exit"}  # no genuine process sends this
    if resident.lacked_memory and said["cause"] in ("exception", "exit"):
        said = {**said, "cause": "memory"}
    if not resident.is_command:
        is_refused = said["cause"] == "exit" and resident.unstored_output
        return {**said, "cause": "store"} if is_refused else said
    detail = "\n".join([*resident.stay.log.last, *said["detail"].splitlines()])
    return {**said, "detail": detail, **resident.left}


def _has_run(resident: Resident) -> bool:
    """True if code of a tenant may have run in the process, so that its exit status is not ours."""
    return resident.record.has_state if resident.is_command else resident.has_entered


_FAULT = "A fault of this device, not of the task, ended its process; its log says which."


def _beyond_its_memory(resident: Resident) -> str:
    if resident.measured_bytes is None:
        return "It has too many processes, so its memory on the device cannot be counted."
    if resident.is_fraction:
        return "It held more memory than its part of the device."
    return "It held more memory on the device than the device may give its tasks."


def _how_it_ended(kill_reason: str, status: int, refused: str) -> str:
    match kill_reason:
        case "max_duration":
            return "It held its device for max_duration_s and was ended."
        case "slow":
            return f"Importing its code took more than {PREPARE_US // 1000000} s."
        case "nonsense":
            return "Its process sent an invalid message."
        case "flood":
            return (
                "Its process sent messages faster than its device worker could read them, for too "
                "long."
            )
        case "deaf":
            seconds = residents.UNREAD_US // 1_000_000
            return f"Its process did not read messages of its device worker for {seconds} s."
    number = -status if status < 0 else status - 128 if status > 128 else 0
    if number == 9:
        return refused or "Its process was killed (SIGKILL); perhaps it ran out of memory."
    told = f"Its process died from signal {number}."
    if not number:
        told = f"Its process exited by itself, with status {status}."
    return f"{refused} {told}" if refused else told
