"""Lets short functions run one after another in one process, each as if it were the first.

The supervisor decides which functions may share a process (`app.core.model.shared_process`). All of
them are in one module, which is imported once. Before each call, some state is set back to what it
was after that import: the variables, the working folder, the random numbers, the switches of torch.
Modules and their globals, open files and all other memory stay as the last call left them. A
process in which a call left a thread runs no further function.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch

from workers.hardware import preset
from workers.residents.endings import JSON, Ending

if TYPE_CHECKING:
    from workers.residents.work import Work

log = logging.getLogger(__name__)

UMASK = 0o077
WRITER = "outputs"  # name of the thread that sends outputs
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SWITCHES = {
    **preset.IMPOSABLE,
    "gradients": preset.Setting(apply=torch.set_grad_enabled, read=torch.is_grad_enabled),
    "default_device": preset.Setting(apply=torch.set_default_device, read=torch.get_default_device),
}


@dataclass
class SharedProcess:
    """Keeps the state of the process after the import of its module, and restores it."""

    is_used: bool = False  # a function has run to its end here
    preset: JSON = field(default_factory=dict)  # preset that was read back
    base_bytes: int = 0  # the memory of the process before any code of the tenant
    threads: set[threading.Thread] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    files: set[str] = field(default_factory=set)  # in the folder
    switches: JSON = field(default_factory=dict)
    generators: tuple[Any, ...] = ()
    streams: tuple[Any, ...] = ()

    def note(self) -> None:
        self.threads = set(threading.enumerate())
        self.variables = dict(os.environ)
        self.folder = os.getcwd()
        self.files = set(os.listdir())
        self.switches = {name: one.read() for name, one in _SWITCHES.items()}
        self.generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self.streams = sys.stdout, sys.stderr

    def give_back(self) -> None:
        """Undo what a call did to the process, as far as possible."""
        self.is_used = True
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        sys.stdout, sys.stderr = self.streams
        os.umask(UMASK)
        if dict(os.environ) != self.variables:
            os.environ.clear()
            os.environ.update(self.variables)
        for name, one in _SWITCHES.items():
            if one.read() != self.switches[name]:
                one.apply(self.switches[name])
        python, numbers, torchs = self.generators
        random.setstate(python)
        numpy.random.set_state(numbers)
        torch.set_rng_state(torchs)
        self._clear_folder()

    def _clear_folder(self) -> None:
        """Go back to the working folder, and remove what the call left in it.

        Names that begin with a dot stay: libraries keep their caches there, and rely on them.
        """
        os.chdir(self.folder)
        for entry in os.scandir():
            if entry.name in self.files or entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.name)
            else:
                os.unlink(entry.name)


def goes_on(work: Work, ending: Ending) -> bool:
    """Make the process ready for its next function; False if it cannot run one.

    It cannot if something other than the function ended the call, or if the call left a thread.
    """
    shared = work.shared
    is_own = ending.message["is"] == "finished" or ending.message.get("cause") == "exception"
    if not (is_own and shared.streams) or work.outgoing.busy:
        return False
    left = (thread for thread in threading.enumerate() if thread not in shared.threads)
    if any(thread.name != WRITER for thread in left):
        return False
    try:
        shared.give_back()
    except Exception as error:  # whatever it is, the next function would begin in its midst
        log.info("its process runs no other function: %s: %s", type(error).__name__, error)
        return False
    return True
