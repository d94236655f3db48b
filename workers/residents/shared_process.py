"""Lets short functions run one after another in one process, each as if it were the first.

The supervisor decides which functions may share a process (`app.core.model.shared_process`). All of
them are in one module, which is imported once. Before each call, some state is set back to what it
was after that import: the variables, the working folder, the random numbers, the switches of torch,
and what the kernel keeps for the process, such as signal handlers and limits. Modules and their
globals, open files and all other memory stay as the last call left them. A process in which a call
left a thread, or changed something that cannot be set back, runs no further function.
"""

from __future__ import annotations

import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from workers.hardware import preset
from workers.residents.endings import JSON

log = logging.getLogger(__name__)

UMASK = 0o077
WRITER = "outputs"  # name of the thread that sends outputs
_SIGNALS = tuple(map(int, signal.valid_signals()))
_LIMITS = {n for name, n in vars(resource).items() if name.startswith("RLIMIT_")}
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SWITCHES = {
    **preset.IMPOSABLE,
    "gradients": preset.Setting(apply=torch.set_grad_enabled, read=torch.is_grad_enabled),
    "default_device": preset.Setting(apply=torch.set_default_device, read=torch.get_default_device),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelState:
    """Holds what the kernel keeps for the process, as far as a call can change it."""

    handlers: dict[int, Any]
    blocked: set[int | signal.Signals]
    limits: dict[int, tuple[int, int]]
    priority: int
    processors: set[int]

    @classmethod
    def read(cls) -> KernelState:
        return cls(
            handlers={number: signal.getsignal(number) for number in _SIGNALS},
            blocked=signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            limits={which: resource.getrlimit(which) for which in _LIMITS},
            priority=os.getpriority(os.PRIO_PROCESS, 0),
            processors=os.sched_getaffinity(0),
        )

    def restore(self) -> None:
        """Set back what has changed; raises OSError, TypeError or ValueError if that is
        impossible.
        """
        now = self.read()
        for which, limit in self.limits.items():
            if now.limits[which] != limit:
                resource.setrlimit(which, limit)
        for number, handler in self.handlers.items():
            if now.handlers[number] != handler:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        if now.priority != self.priority:
            os.setpriority(os.PRIO_PROCESS, 0, self.priority)
        if now.processors != self.processors:
            os.sched_setaffinity(0, self.processors)


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
    kernel: KernelState | None = None

    def note(self) -> None:
        self.threads = set(threading.enumerate())
        self.variables = dict(os.environ)
        self.folder = os.getcwd()
        self.files = set(os.listdir())
        self.switches = {name: one.read() for name, one in _SWITCHES.items()}
        self.generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        self.streams = sys.stdout, sys.stderr
        self.kernel = KernelState.read()

    def make_ready(self) -> bool:
        """Make the process ready for its next function; False if it cannot run one, since nothing
        was noted, the call left a thread, or something cannot be set back.
        """
        if not self.streams:
            return False
        left = (thread for thread in threading.enumerate() if thread not in self.threads)
        if any(thread.name != WRITER for thread in left):
            return False
        try:
            self.give_back()
        except Exception as error:  # whatever it is, the next function would begin in its midst
            log.info("its process runs no other function: %s: %s", type(error).__name__, error)
            return False
        return True

    def give_back(self) -> None:
        """Undo what a call did to the process, as far as possible."""
        self.is_used = True
        assert self.kernel is not None, "noted after the import"
        self.kernel.restore()
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
