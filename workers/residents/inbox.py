"""Takes in the supervisor's messages. Requested actions wait for the next safe point."""

from __future__ import annotations

from app.core.model import codec
from workers.process.task_start import TaskStart
from workers.residents.endings import JSON, Abandoned
from workers.residents.work import Work


def listen(work: Work, timeout_s: float | None) -> None:
    """Process the messages that have arrived, waiting up to `timeout_s` for one."""
    if work.wire.wait(timeout_s):
        for message in work.wire.receive():
            _take(work, message)
        if work.wire.closed:
            raise Abandoned


def _take(work: Work, message: JSON) -> None:
    match message["is"]:
        case "begin":
            work.start = codec.from_json(TaskStart, message["start"])
            work.wishes = set()
            work.fds = _files(work, message["files"])
        case "pause" | "yield" | "go":
            _take_turn(work, message)
        case "leave":
            work.turn = message["turn"]
            work.wishes.add("leave")
        case "return":
            work.turn = message["turn"]
            work.granted_bytes += message["bytes"]
            work.wishes.add("return")
        case "block":
            (work.arrived[message["port"]],) = _files(work, 1)
        case "on":
            work.stands_at = message["step"]
            work.wishes.add("on")
        case "patience":
            work.patience_s = message["s"]
        case "call_off":
            work.images.call_off(message["round"])
        case "kept":
            _take_kept(work, message)
        case wish:
            work.wishes.add(wish)


def _take_kept(work: Work, message: JSON) -> None:
    if message["what"] == "image":
        work.images.kept(message)
    else:
        work.outgoing.kept(message, _files(work, message["files"]))


def _files(work: Work, count: int) -> list[int]:
    """Take the descriptors of one message; the rest belong to later messages."""
    files, work.wire.fds = work.wire.fds[:count], work.wire.fds[count:]
    return files


def _take_turn(work: Work, message: JSON) -> None:
    """Note an order to pause, to yield the slot to other tasks' slices, or to take the slot."""
    match message["is"]:
        case "go":  # the supervisor sends this only after it heard of the pause
            work.wishes -= {"pause", "yield"}
            work.wishes.add("go")
        case "yield":
            work.wishes |= {"pause", "yield"}
        case _:
            work.wishes.discard("yield")
            work.wishes.add("pause")
            if message.get("leave"):
                work.turn = message["turn"]
                work.wishes.add("leave")
