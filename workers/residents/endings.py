"""Ends a task early: builds the last message of its process, in words for the tenant."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from workers.capture.capture import Uncapturable
from workers.graph import runner
from workers.switching.staging import ImageTooLarge

JSON = dict[str, Any]

DETAIL_LIMIT = 60_000  # characters of a traceback

# Files whose frames are left out at the top of a traceback: they only call the tenant's code.
_CALLERS = {
    runner.__file__,
    *(
        str(Path(__file__).with_name(f"{name}.py"))
        for name in ("context", "entry", "late_inputs", "outputs", "safe_point", "stages")
    ),
}


class Ending(Exception):
    """Ends the task; carries the final message of the process."""

    def __init__(self, word: str, **said: Any) -> None:
        self.message = {"is": word, **said}
        super().__init__(word)


class Abandoned(BaseException):
    """Raised when the supervisor is gone. No process then waits for results of this one."""


@contextlib.contextmanager
def told_as_ending() -> Iterator[None]:
    """If no image can be made, turn the reason into the job's last message."""
    try:
        yield
    except Uncapturable as error:
        raise uncapturable(error) from error
    except ImageTooLarge as error:
        raise too_large(error) from error


def too_large(error: ImageTooLarge) -> Ending:
    told = f"The job cannot be saved: {error} (ROUNDHOUSE_HOST_MEMORY_BYTES)."
    return Ending("failed", cause="uncapturable", message=told, detail="")


def uncapturable(error: Uncapturable) -> Ending:
    return Ending("failed", cause="uncapturable", message=str(error), detail="")


def as_ending(error: BaseException, *, cause: str = "exception", begun: str = "") -> Ending:
    """Return an `Ending` with the error's last line, and the traceback from the first line of the
    tenant's code.
    """
    if isinstance(error, Abandoned | Ending):
        raise error
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    shown = traceback.format_exception(type(error), error, _theirs(error))
    if cause == "exception":
        cause = _cause_of(error)
    return Ending(
        "failed", cause=cause, message=begun + last[:2000], detail="".join(shown)[-DETAIL_LIMIT:]
    )


def _cause_of(error: BaseException) -> str:
    match error:
        case MemoryError():
            return "memory"
        case torch.OutOfMemoryError():
            return "device_memory"
    return "exception"


def _theirs(error: BaseException) -> Any:
    frames = error.__traceback__
    while frames is not None and inspect.getfile(frames.tb_frame) in _CALLERS:
        frames = frames.tb_next
    return frames
